"""Mini-batches of whole groups, micro-batches by tokens, counts per optimizer step."""

from __future__ import annotations

from quintet.train.batching import counts, micro_batches, mini_batches, trainable
from quintet.train.forward import Layout
from quintet.train.packing import TokenSample
from quintet.types import Experience, GroupId


def experience(group: int, index: int, mask: list[int], reward: float | None = 1.0) -> Experience:
    ids = list(range(len(mask)))
    return Experience(GroupId(f"p{group}"), index, [1, 2], ids, [0.0] * len(ids), mask, reward, weight_version=0)


def test_unscored_samples_and_rows_without_loss_tokens_are_left_out_and_not_counted() -> None:
    batch = [
        experience(0, 0, [1, 1, 1]),
        experience(0, 1, [1, 1], reward=None),
        experience(0, 2, [0, 0, 0, 0, 0, 0]),
        experience(0, 3, []),
        experience(1, 0, [1, 0, 1, 0], reward=0.0),
    ]
    kept = trainable(batch)
    assert [(e.group_id.prompt_id, e.sample_index) for e in kept] == [("p0", 0), ("p1", 0)]
    found = counts(kept)
    assert (found.tokens, found.sequences, found.max_length) == (5.0, 2.0, 4)


def test_mini_batches_keep_groups_whole_and_the_order() -> None:
    batch = [experience(g, i, [1]) for g in range(5) for i in range(3)]
    parts = mini_batches(batch, 2)
    assert [[e.group_id.prompt_id for e in part] for part in parts] == [
        ["p0"] * 3 + ["p1"] * 3,
        [f"p{g}" for g in (2, 3, 4) for _ in range(3)],
    ]
    assert [e for part in parts for e in part] == batch
    interleaved = mini_batches([experience(g, 0, [1]) for g in (0, 1, 0, 1)], 2)
    assert [[e.group_id.prompt_id for e in part] for part in interleaved] == [["p0", "p0"], ["p1", "p1"]]


def test_there_is_no_empty_mini_batch() -> None:
    assert [len(part) for part in mini_batches([experience(0, i, [1]) for i in range(4)], 3)] == [4]
    assert mini_batches([], 2) == []


def sample(prompt: int, length: int) -> TokenSample:
    return TokenSample([prompt] * 10, [1] * length, [1] * length)


def test_a_shared_prompt_counts_once_in_a_micro_batch() -> None:
    samples = [sample(7, 6)] * 4  # 10 prompt tokens, 5 in the row per response
    assert micro_batches(samples, 30, Layout.SHARED) == [range(0, 4)]
    assert micro_batches(samples, 29, Layout.SHARED) == [range(0, 3), range(3, 4)]
    assert micro_batches(samples, 30, Layout.PACKED) == [range(0, 2), range(2, 4)]


def test_padding_counts_where_rows_are_padded() -> None:
    samples = [sample(1, 11), sample(2, 2), sample(3, 2)]  # 20, 11 and 11 tokens
    assert micro_batches(samples, 42, Layout.PACKED) == [range(0, 3)]
    assert micro_batches(samples, 42, Layout.PADDED) == [range(0, 2), range(2, 3)]


def test_a_sample_longer_than_the_budget_goes_alone() -> None:
    samples = [sample(1, 2), sample(2, 500), sample(3, 2), sample(3, 2)]
    assert micro_batches(samples, 40, Layout.SHARED) == [range(0, 1), range(1, 2), range(2, 4)]
    assert micro_batches([], 40, Layout.SHARED) == []

"""One row without padding: what stands where, and who may see whom."""

from __future__ import annotations

import pytest
import torch

from quintet.train.packing import PackedRow, TokenSample, pack, pad

CPU = torch.device("cpu")
A = TokenSample([10, 11, 12], [20, 21, 22], [1, 0, 1])
B = TokenSample([10, 11, 12], [30, 31], [1, 1])
C = TokenSample([40], [50], [1])


def visible_pairs(row: PackedRow) -> set[tuple[int, int]]:
    """(query row, key row) pairs that the buckets let see each other, padding left out."""
    out: set[tuple[int, int]] = set()
    outputs: list[tuple[int, int, int]] = []
    for b, bucket in enumerate(row.buckets):
        n, q = bucket.query_rows_NQ.shape
        outputs += [(b, i, j) for i in range(n) for j in range(q)]
    for t, place in enumerate(row.restore_T.tolist()):
        b, i, j = outputs[place]
        bucket = row.buckets[b]
        assert int(bucket.query_rows_NQ[i, j]) == t
        keys = bucket.key_rows_NK[i]
        visible = bucket.visible_QK[j] if bucket.visible_QK is not None else torch.arange(len(keys)) <= j
        out |= {(t, int(k)) for k in keys[visible]}
    return out


def test_a_shared_prompt_stands_once_and_positions_continue_from_it() -> None:
    row = pack([A, B, C], shared_prompt=True, device=CPU)
    # prompt, A without its last token, B without its last token, C's prompt
    assert row.input_ids_1T.tolist() == [[10, 11, 12, 20, 21, 30, 40]]
    assert row.position_ids_1T.tolist() == [[0, 1, 2, 3, 4, 3, 0]]
    causal = {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}
    a = {(3, k) for k in (0, 1, 2, 3)} | {(4, k) for k in (0, 1, 2, 3, 4)}
    b = {(5, k) for k in (0, 1, 2, 5)}
    assert visible_pairs(row) == causal | a | b | {(6, 6)}


def test_without_sharing_every_sample_is_whole() -> None:
    row = pack([A, B], shared_prompt=False, device=CPU)
    assert row.input_ids_1T.tolist() == [[10, 11, 12, 20, 21, 10, 11, 12, 30]]
    assert row.position_ids_1T.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert (5, 4) not in visible_pairs(row)


def test_a_token_is_predicted_by_the_row_before_it() -> None:
    """ALG36: token t is predicted by the output at t - 1; the first by the prompt's last, for every sample."""
    row = pack([A, B, C], shared_prompt=True, device=CPU)
    assert row.loss.source_N.tolist() == [2, 4, 2, 5, 6]
    assert row.loss.target_N.tolist() == [20, 22, 30, 31, 50]
    assert row.loss.scatter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [[1, 0, 2], [3, 4, 0], [5, 0, 0]]
    sample = TokenSample([1, 2], [3, 4], [1, 1])
    assert pack([sample], shared_prompt=True, device=CPU).loss.source_N.tolist() == [1, 2]


def test_padded_rows_predict_the_same_tokens() -> None:
    rows = pad([A, C], device=CPU)
    assert rows.input_ids_BL.tolist() == [[10, 11, 12, 20, 21], [40, 0, 0, 0, 0]]
    assert rows.attention_mask_BL.tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert rows.loss.source_N.tolist() == [2, 4, 5]


def test_no_mask_as_large_as_the_row_exists() -> None:
    samples = [TokenSample([p] * 100, [1] * 60, [1] * 60) for p in range(8) for _ in range(4)]
    row = pack(samples, shared_prompt=True, device=CPU)
    total = row.input_ids_1T.numel()
    largest = max(b.visible_QK.numel() for b in row.buckets if b.visible_QK is not None)
    assert total == 8 * 100 + 32 * 59
    assert largest == 59 * 159 < total * total / 500


def test_a_sample_without_prompt_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="without prompt tokens"):
        pack([TokenSample([], [1], [1])], shared_prompt=True, device=CPU)

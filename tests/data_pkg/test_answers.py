"""Rows with given answers: the usual column names, what is left out, and batches as a function of their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quintet.data.answers import (
    Answered,
    AnswerEncoder,
    BatchSampler,
    Form,
    answer_key,
    build_answered,
    find_form,
)
from quintet.data.dataset import load_rows
from quintet.data.prompts import SkipReason
from quintet.data.rows import as_rows
from quintet.data.tasks import task_rows
from quintet.types import QuintetError
from tests.data_pkg.helpers import config, encode, write_jsonl

END = 1
ENCODER = AnswerEncoder(encode, lambda text: [*map(ord, text), END], max_response_tokens=20, context_tokens=40)


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def built(records: list[dict[str, Any]], form: Form, **options: Any) -> tuple[list[Answered], list[Any]]:
    return build_answered(as_rows("data", records), config("data", **options), form, ENCODER)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": [user("q")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
        {"prompt": "q", "chosen": [user("q"), assistant("yes")], "rejected": [user("q"), assistant("no")]},
        {"chosen": [user("q"), assistant("yes")], "rejected": [user("q"), assistant("no")]},
    ],
    ids=["strings", "messages", "full-conversations", "implicit-prompt"],
)
def test_a_pair_in_each_of_its_forms(record: dict[str, Any]) -> None:
    kept, skipped = built([record], Form.PAIR)
    assert kept == [Answered(ids("q"), [*ids("yes"), END], [*ids("no"), END])] and skipped == []


def test_labels_and_supervised_rows() -> None:
    kept, _ = built([{"prompt": "q", "completion": "a", "label": False}], Form.LABEL)
    assert kept == [Answered(ids("q"), [*ids("a"), END], desirable=False)]
    for record in (
        {"messages": [user("q"), assistant("a")]},
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "answer": "a"},
    ):
        assert built([record], Form.SUPERVISED)[0] == [Answered(ids("q"), [*ids("a"), END])]


def test_columns_can_be_renamed_and_a_margin_read() -> None:
    answers = {"chosen": "good", "rejected": "bad", "margin": "gap"}
    kept, _ = built([{"prompt": "q", "good": "a", "bad": "b", "gap": 2}], Form.PAIR, answers=answers)
    assert kept[0].margin == 2.0
    with pytest.raises(QuintetError, match="margin in 'gap' is 'big'"):
        built([{"prompt": "q", "good": "a", "bad": "b", "gap": "big"}], Form.PAIR, answers=answers)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "", "chosen": "a", "rejected": "b"}, SkipReason.EMPTY_PROMPT),
        ({"prompt": "q", "chosen": "a", "rejected": "  "}, SkipReason.NO_ANSWER),
        ({"prompt": "q", "chosen": "a", "rejected": None}, SkipReason.NO_ANSWER),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, SkipReason.UNUSABLE_ANSWER),
        ({"prompt": "q" * 11, "chosen": "a", "rejected": "b"}, SkipReason.OVERLONG),
        ({"prompt": "q", "chosen": "a" * 20, "rejected": "b"}, SkipReason.OVERLONG),
    ],
)
def test_what_teaches_nothing_or_does_not_fit_is_left_out_with_its_reason(
    record: dict[str, Any], reason: SkipReason
) -> None:
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    kept, skipped = built([good, record], Form.PAIR, max_prompt_tokens=10)
    assert len(kept) == 1 and [(s.number, s.reason) for s in skipped] == [(2, reason)]


def test_an_overlong_prompt_can_be_cut_or_refused() -> None:
    record = {"prompt": "0123456789ab", "chosen": "a", "rejected": "b"}
    kept, skipped = built([record], Form.PAIR, max_prompt_tokens=10, overlong="truncate")
    assert kept[0].prompt_ids == ids("23456789ab") and skipped[0].reason is SkipReason.TRUNCATED
    with pytest.raises(QuintetError, match="12 tokens"):
        built([record], Form.PAIR, max_prompt_tokens=10, overlong="error")


@pytest.mark.parametrize(
    ("record", "form", "words"),
    [
        ({"chosen": "a", "rejected": "b"}, Form.PAIR, "no list of messages"),
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("r"), assistant("b")]}, Form.PAIR, "differ before"),
        ({"messages": [user("q")]}, Form.SUPERVISED, "does not end with an assistant"),
        ({"prompt": "q", "completion": "a", "label": 1}, Form.LABEL, "must be true or false"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(record: dict[str, Any], form: Form, words: str) -> None:
    with pytest.raises(QuintetError, match=words) as error:
        built([record], form)
    assert "data, row 1" in str(error.value)


def test_the_form_follows_the_columns_and_a_missing_one_is_named() -> None:
    pairs = as_rows("data", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    assert find_form(pairs, config("data"), [Form.LABEL, Form.PAIR]) is Form.PAIR
    with pytest.raises(QuintetError, match=r"'completion' \(data\.answers\.completion\), 'label'"):
        find_form(pairs, config("data"), [Form.LABEL])


def test_equal_prompts_never_stand_on_both_sides(tmp_path: Path) -> None:
    records = [{"prompt": f"q{i // 3}", "chosen": f"a{i}", "rejected": "b"} for i in range(30)]
    source = write_jsonl(tmp_path / "pairs.jsonl", records)
    train, held_out = load_rows(config(source, eval_size=9), 0, key_of=answer_key(Form.PAIR))
    assert len(held_out) == 9 and len(train) == 21
    assert not {r.values["prompt"] for r in train} & {r.values["prompt"] for r in held_out}


def test_wrong_sums_are_wrong_and_written_like_right_ones() -> None:
    rows = [r.values for r in task_rows("sums_pairs", {"max": 12, "wrong": 3, "answer_digits": 3, "reverse": True}, 0)]
    assert len(rows) == 3 * 169
    for r in rows:
        assert int(r["chosen"][::-1]) == r["a"] + r["b"] != int(r["rejected"][::-1])
        assert len(r["chosen"]) == len(r["rejected"]) == 3
    off_by_a_digit = sum(sum(x != y for x, y in zip(r["chosen"], r["rejected"], strict=True)) == 1 for r in rows)
    assert 0.4 < off_by_a_digit / len(rows) < 0.9


def test_batches_are_a_function_of_their_number() -> None:
    examples = [Answered([i], [END]) for i in range(5)]
    sampler = BatchSampler(examples, 2, seed=3, shuffle=True, epochs=2)
    drawn = [[e.prompt_ids[0] for e in sampler.batch(i)] for i in range(6)]
    stream = [i for batch in drawn for i in batch]
    assert sorted(stream[:5]) == sorted(stream[5:]) == list(range(5))
    assert [len(b) for b in drawn] == [2, 2, 2, 2, 2, 0]
    assert [e.prompt_ids[0] for e in BatchSampler(examples, 2, seed=3, shuffle=True, epochs=2).batch(3)] == drawn[3]
    in_order = BatchSampler(examples, 2, seed=3, shuffle=False, epochs=None)
    assert [e.prompt_ids[0] for e in in_order.batch(2)] == [4, 0]


def chat(messages: list[dict[str, Any]] | None, text: str | None) -> list[int]:
    """A template with the prefix property: role letter, content, END; then the answer's role letter."""
    assert messages is not None
    turns = [i for m in messages for i in [ord(m["role"][0]), *ids(m["content"]), END]]
    return [*turns, ord("a")]


TALK = [user("q"), assistant("x"), user("r"), assistant("yz")]


def test_every_assistant_message_is_trained_in_one_sequence() -> None:
    encoder = AnswerEncoder(chat, ENCODER.answer, 20, 40, every_turn=True)
    (row,), skipped = build_answered(as_rows("data", [{"messages": TALK}]), config("data"), Form.SUPERVISED, encoder)
    assert skipped == [] and isinstance(row, Answered)
    assert list(row.prompt_ids) == [*ids("uq"), END, ord("a")]
    assert list(row.response_ids) == [*ids("x"), END, *ids("ur"), END, ord("a"), *ids("yz"), END]
    assert list(row.trained) == [1, 1, 0, 0, 0, 0, 1, 1, 1]
    last = AnswerEncoder(chat, ENCODER.answer, 20, 40)
    (row,), _ = build_answered(as_rows("data", [{"messages": TALK}]), config("data"), Form.SUPERVISED, last)
    assert list(row.response_ids) == [*ids("yz"), END] and list(row.trained) == [1, 1, 1]


def test_a_template_that_rewrites_earlier_turns_leaves_the_row_out() -> None:
    def forgetful(messages: list[dict[str, Any]] | None, text: str | None) -> list[int]:
        assert messages is not None
        return chat([m for m in messages if m["role"] == "user"], text)

    encoder = AnswerEncoder(forgetful, ENCODER.answer, 20, 40, every_turn=True)
    with pytest.raises(QuintetError, match="writes earlier turns differently"):
        build_answered(as_rows("data", [{"messages": TALK}]), config("data"), Form.SUPERVISED, encoder)


def test_every_turn_of_data_without_conversations_is_refused() -> None:
    encoder = AnswerEncoder(encode, ENCODER.answer, 20, 40, every_turn=True)
    with pytest.raises(QuintetError, match="train_on all has no effect"):
        build_answered(as_rows("data", [{"prompt": "q", "completion": "x"}]), config("data"), Form.SUPERVISED, encoder)


def test_malformed_answers_are_a_share_and_nothing_else_changes() -> None:
    args = {"max": 9, "wrong": 3, "answer_digits": 2, "template": "{a}+{b}="}
    plain, mixed = (
        [row.values for row in task_rows("sums_pairs", args | extra, 0)] for extra in ({}, {"malformed": 0.5})
    )
    assert {len(row["rejected"]) for row in plain} == {2}
    bad = [row["rejected"] for row in mixed if len(row["rejected"]) != 2]
    assert 0.4 < len(bad) / len(mixed) < 0.6 and {len(text) for text in bad} == {1, 3, 4}
    assert all(row["chosen"] == row["answer"] for row in mixed)
    with pytest.raises(QuintetError, match="is no share"):
        task_rows("sums_pairs", args | {"malformed": 2.0}, 0)

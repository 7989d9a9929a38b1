"""Splitting, columns, templates, ids, and rows that cannot be trained on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.data.config import DataConfig
from quintet.data.dataset import SkipReason, build_prompts, describe_skipped, load_rows
from quintet.data.rows import as_rows
from quintet.types import QuintetError
from tests.data_pkg.helpers import config, encode, load_cases, write_jsonl

CASES = load_cases()


def test_missing_column_lists_wanted_and_present_ones_and_text_stays_intact(tmp_path: Path) -> None:
    """CFG13."""
    record = CASES["CFG13"]["input"]["dataset_rows"][0]
    source = write_jsonl(tmp_path / "d.jsonl", [record])
    with pytest.raises(QuintetError, match=r"d\.jsonl:1: wanted column 'question' .*; present: 'prompt', 'answer'"):
        load_rows(config(source, columns={"prompt": "question"}), 0)
    prompts, _ = build_prompts(load_rows(config(source), 0)[0], config(source), encode)
    assert (prompts[0].text, prompts[0].answer) == ("求 1+1 的值", "2")
    assert "".join(map(chr, prompts[0].token_ids)) == "求 1+1 的值"


def test_answer_column_is_wanted_unless_set_to_null(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "p"}])
    with pytest.raises(QuintetError, match=r"wanted column 'answer' \(data\.columns\.answer\)"):
        load_rows(config(source), 0)
    cfg = config(source, columns={"answer": None})
    assert build_prompts(load_rows(cfg, 0)[0], cfg, encode)[0][0].answer is None


def test_eval_source_must_have_the_columns_too(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "p", "answer": "1"}])
    held_out = write_jsonl(tmp_path / "e.jsonl", [{"question": "q", "answer": "2"}])
    with pytest.raises(QuintetError, match=r"e\.jsonl:1: wanted column 'prompt'"):
        load_rows(config(source, eval_source=held_out, eval_size=100), 0)


def test_eval_source_is_held_out_whole(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", [{"prompt": str(i), "answer": "1"} for i in range(9)])
    held_out = write_jsonl(tmp_path / "e.jsonl", [{"prompt": "q", "answer": "2"}])
    train, evaluation = load_rows(config(source, eval_source=held_out, eval_size=100, limit=4), 0)
    assert [r.values["prompt"] for r in train] == ["0", "1", "2", "3"]
    assert [r.values["prompt"] for r in evaluation] == ["q"]


def test_demo_split_is_exact_disjoint_and_the_same_for_every_run_seed() -> None:
    cfg = DataConfig(source="task:sums", args={"max": 19}, eval_size=100)
    train, held_out = load_rows(cfg, 1)
    asked = [{r.values["prompt"] for r in rows} for rows in (train, held_out)]
    assert (len(train), len(held_out), len(asked[0] | asked[1])) == (300, 100, 400)
    assert load_rows(cfg, 1) == (train, held_out)
    assert {r.values["prompt"] for r in load_rows(cfg, 2)[1]} == asked[1]
    other = cfg.model_copy(update={"held_out_seed": 1})
    assert {r.values["prompt"] for r in load_rows(other, 1)[1]} != asked[1]


@given(keys=st.lists(st.integers(0, 8), min_size=2, max_size=30), size=st.integers(1, 10), seed=st.integers(0, 99))
def test_equal_prompts_never_stand_on_both_sides(keys: list[int], size: int, seed: int) -> None:
    from quintet.data.dataset import _hold_out
    from quintet.data.prompts import prompt_key

    rows = as_rows("d", [{"prompt": str(k), "answer": str(i)} for i, k in enumerate(keys)])
    cfg = config("d.jsonl", eval_size=size, held_out_seed=seed)
    try:
        train, held_out = _hold_out(rows, cfg, prompt_key(rows, cfg))
    except QuintetError:
        smallest = min(keys.count(k) for k in keys)
        assert size < smallest or size >= len(rows)
        return
    assert not {r.values["prompt"] for r in train} & {r.values["prompt"] for r in held_out}
    assert sorted(r.number for r in train + held_out) == list(range(1, len(rows) + 1))
    assert train and 1 <= len(held_out) <= size


def test_eval_size_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(QuintetError, match="4 held-out rows cannot be split from the 4 rows"):
        load_rows(DataConfig(args={"max": 1}, eval_size=4), 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"source": "d.jsonl", "args": {"x": 1}}, "args"),
        ({"source": "task:sums", "split": "test"}, "split"),
        ({"source": "org/set", "eval_split": "dev"}, "eval_split"),
        ({"source": "org/set", "eval_source": "org/other", "eval_size": 7}, "eval_size"),
    ],
)
def test_option_without_effect_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(QuintetError, match=rf"data\.{named} has no effect"):
        load_rows(DataConfig.model_validate(options), 0)


def test_fields_of_a_prompt_come_from_their_columns() -> None:
    record = {
        "q": [{"role": "user", "content": "hi"}],
        "gold": 3.5,
        "tests": '[{"input": "1", "output": "2"}]',
        "kind": "code",
        "key": 17,
        "level": "hard",
    }
    columns = {"prompt": "q", "answer": "gold", "test_cases": "tests", "task_type": "kind", "id": "key"}
    prompts, skipped = build_prompts(as_rows("d", [record]), config("d", columns=columns), encode)
    prompt = prompts[0]
    assert (prompt.id, prompt.messages, prompt.text, prompt.answer) == ("17", record["q"], None, "3.5")
    assert (prompt.test_cases, prompt.task_type) == ([{"input": "1", "output": "2"}], "code")
    assert (prompt.metadata, prompt.token_ids, skipped) == ({"level": "hard"}, [104, 105], [])


def test_template_is_filled_from_the_columns() -> None:
    rows = as_rows("d", [{"a": 1, "b": {"c": 2}, "answer": "3"}])
    prompts, _ = build_prompts(rows, config("d", prompt_template="{a} + {b[c]} = {{?}}"), encode)
    assert (prompts[0].text, prompts[0].metadata) == ("1 + 2 = {?}", {"a": 1, "b": {"c": 2}})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{a} + {z}", r"wanted column 'z' \(data\.prompt_template \{z\}\); present: 'a', 'answer'"),
        ("no field", "must name columns"),
        ("{a", "expected '}'"),
        ("{a[x]}", "cannot be filled from this row"),
    ],
)
def test_template_that_cannot_be_filled_is_refused(template: str, message: str) -> None:
    with pytest.raises(QuintetError, match=message):
        build_prompts(as_rows("d", [{"a": 1, "answer": "3"}]), config("d", prompt_template=template), encode)


def test_id_is_a_function_of_the_content() -> None:
    def ids(records: list[dict[str, str]]) -> list[str]:
        return [p.id for p in build_prompts(as_rows("d", records), config("d"), encode)[0]]

    a, b = {"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}
    first, second = ids([a, b])
    assert first != second
    assert ids([b, a]) == [second, first]
    assert ids([a, a, b, a]) == [first, f"{first}-2", second, f"{first}-3"]
    assert ids([a | {"level": "hard"}]) == [first]
    assert first == hashlib.sha256(b'["a",null,"1",null]').hexdigest()[:16]


def test_two_rows_with_one_id_are_refused() -> None:
    rows = as_rows("d", [{"prompt": "a", "answer": "1", "id": 5}, {"prompt": "b", "answer": "1", "id": "5"}])
    with pytest.raises(QuintetError, match="d, row 2: the id '5' is also the id of d, row 1"):
        build_prompts(rows, config("d", columns={"id": "id"}), encode)


def test_answer_that_cannot_be_graded_is_reported_with_its_row() -> None:
    """REW23: excluded, not scored 0 or 1."""
    gold = CASES["REW23"]["input"]["gold"]
    records = [{"prompt": "a", "answer": "4"}, {"prompt": "b", "answer": gold}, {"prompt": "c", "answer": " "}]
    records.append({"prompt": "d", "answer": None})
    prompts, skipped = build_prompts(
        as_rows("d.jsonl", records), config("d.jsonl"), encode, usable_answer=lambda a: any(c.isdigit() for c in a)
    )
    assert [p.text for p in prompts] == ["a"]
    assert [(s.where, s.number, s.reason) for s in skipped] == [
        ("d.jsonl:2", 2, SkipReason.UNUSABLE_ANSWER),
        ("d.jsonl:3", 3, SkipReason.NO_ANSWER),
        ("d.jsonl:4", 4, SkipReason.NO_ANSWER),
    ]
    lines = describe_skipped(skipped)
    assert (
        lines[0] == f"1 rows skipped (unusable_answer): d.jsonl:2: no reward can be computed from the answer {gold!r}"
    )
    assert lines[1].startswith("2 rows skipped (no_answer): d.jsonl:3, d.jsonl:4: the column 'answer' is empty")


def overlong_rows() -> list:  # type: ignore[type-arg]
    case = CASES["ROL06"]["input"]
    long = "".join(chr(97 + i) for i in range(case["prompt_tokens"]))
    return as_rows("d.jsonl", [{"prompt": p, "answer": "1"} for p in ("short", long, "exactly 16 chars")])


@pytest.mark.parametrize("by_context", [True, False])
def test_overlong_prompt_is_skipped_counted_and_named(by_context: bool) -> None:
    """ROL06."""
    context = CASES["ROL06"]["input"]["context"]
    cfg = config("d.jsonl", **({} if by_context else {"max_prompt_tokens": context}))
    prompts, skipped = build_prompts(overlong_rows(), cfg, encode, prompt_limit=context if by_context else None)
    assert [p.text for p in prompts] == ["short", "exactly 16 chars"]
    assert describe_skipped(skipped) == ["1 rows skipped (overlong): d.jsonl:2: 20 tokens, at most 16 fit"]


def test_overlong_prompt_is_cut_to_its_end_when_asked() -> None:
    prompts, skipped = build_prompts(overlong_rows(), config("d", overlong="truncate", max_prompt_tokens=16), encode)
    assert "".join(map(chr, prompts[1].token_ids)) == "efghijklmnopqrst"
    assert describe_skipped(skipped) == ["1 rows cut (truncated): d.jsonl:2: 20 tokens, at most 16 fit"]
    assert [p.text for p in prompts if len(p.token_ids) < 16] == ["short"]


def test_overlong_prompt_is_an_error_when_asked() -> None:
    with pytest.raises(QuintetError, match=r"d\.jsonl:2: the prompt is too long: 20 tokens, at most 16 fit"):
        build_prompts(overlong_rows(), config("d", overlong="error", max_prompt_tokens=16), encode)


def test_no_row_left_is_an_error_that_says_why() -> None:
    with pytest.raises(QuintetError, match=r"no usable row is left. 2 rows skipped \(overlong\)"):
        build_prompts(overlong_rows()[1:], config("d", max_prompt_tokens=3), encode)


def test_context_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(QuintetError, match=r"leaves -4 tokens for a prompt"):
        build_prompts(overlong_rows(), config("d"), encode, prompt_limit=-4)


@pytest.mark.parametrize("prompt", ["", "  \n", [], None])
def test_empty_prompt_is_skipped(prompt: object) -> None:
    rows = as_rows("d", [{"prompt": prompt, "answer": "1"}, {"prompt": "x", "answer": "1"}])
    prompts, skipped = build_prompts(rows, config("d"), encode)
    assert (len(prompts), skipped[0].reason, skipped[0].where) == (1, "empty_prompt", "d, row 1")


@pytest.mark.parametrize("prompt", [3, ["hi"], [{"role": "user"}]])
def test_prompt_of_another_kind_is_refused(prompt: object) -> None:
    with pytest.raises(QuintetError, match="d, row 1: the prompt is no string and no list of messages"):
        build_prompts(as_rows("d", [{"prompt": prompt, "answer": "1"}]), config("d"), encode)


@pytest.mark.parametrize("tests", ["{broken", [1], "3"])
def test_test_cases_of_another_kind_are_refused(tests: object) -> None:
    rows = as_rows("d", [{"prompt": "p", "answer": "1", "tests": tests}])
    with pytest.raises(QuintetError, match=r"d, row 1: the test cases in 'tests' are n"):
        build_prompts(rows, config("d", columns={"test_cases": "tests"}), encode)


@pytest.mark.parametrize(
    ("tests", "read"),
    [
        ('{"inputs": ["1"], "outputs": ["2"]}', [{"inputs": ["1"], "outputs": ["2"]}]),
        (["assert f(1) == 2", "assert f(2) == 3"], [{"assert": "assert f(1) == 2"}, {"assert": "assert f(2) == 3"}]),
        ("def check(f):\n    assert f(1)", [{"assert": "def check(f):\n    assert f(1)"}]),
        ([], []),
    ],
)
def test_test_cases_of_well_known_data_sets_are_understood(tests: object, read: object) -> None:
    rows = as_rows("d", [{"prompt": "p", "answer": "1", "tests": tests}])
    prompts, _ = build_prompts(rows, config("d", columns={"test_cases": "tests"}), encode)
    assert prompts[0].test_cases == read

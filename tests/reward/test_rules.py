"""The built-in rule rewards, by value."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from quintet.reward.config import RewardConfig
from quintet.reward.errors import FunctionFailed
from quintet.reward.extract import after_thinking, last_box, numbers, single_number
from quintet.reward.rules import exact, format, length, length_target, number, reasoning_gym
from quintet.reward.sample import Sample
from quintet.reward.service import LocalRewardService
from quintet.types import QuintetError

CASES = {
    case["id"]: case
    for line in (Path(__file__).parents[1] / "data" / "cases_reward.jsonl").read_text().splitlines()
    for case in [json.loads(line)]
}


def sample(text: str, answer: str | None = None, **fields: Any) -> Sample:
    return Sample("p", text, list(range(fields.pop("tokens", 3))), False, answer=answer, **fields)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("Final answer: **31**", [31]),  # REW25
        ("7 - 3 = 4", [7, 3, 4]),
        ("x-3", [3]),
        ("x = - 3", [-3]),
        ("- 3 apples", [3]),
        ("it is -3.", [-3]),
        ("\u22123", [-3]),
        ("(-3)", [-3]),
        ("$1,234.50", [Fraction("1234.5")]),
        ("1,2,3", [1, 2, 3]),
        ("1,2345", [1, 2345]),
        ("about .5", [Fraction(1, 2)]),
        ("3/4 of it", [Fraction(3, 4)]),
        ("1/0", [1]),
        ("1.5e3", [1500]),
        ("5.0", [5]),
        ("no digits", []),
        ("1" * 500, ["1" * 500]),
    ],
)
def test_numbers_are_read_exactly(text: str, values: list[Any]) -> None:
    assert numbers(text) == values


def test_the_last_number_counts_and_integers_are_exact() -> None:
    assert number(sample("3 + 4 = 7", "7")).value == 1.0
    assert number(sample("7, no: 8", "7")).value == 0.0
    assert number(sample("1000001", "1000000"), rel_tol=0.1).value == 0.0
    assert number(sample("0.3334", "1/3"), rel_tol=1e-3).value == 1.0
    assert number(sample("0.3334", "1/3")).value == 0.0
    assert number(sample("Answer: **31**", CASES["REW25"]["input"]["gold"])).value == 1.0
    assert number(sample("#### 72", "some steps #### 72")).value == 1.0
    assert number(sample("none", "7")).value == 0.0


def test_numbers_inside_the_thinking_part_do_not_count() -> None:
    assert number(sample("<think>7</think> I give up", "7")).value == 0.0
    assert after_thinking("<think>a</think> b") == " b"


def test_extract_says_where_the_number_stands() -> None:
    text = r"<answer>5</answer> so \boxed{6}" + "\n#### 7\n8"
    graded = {
        place: number(sample(text, "1"), extract=place).info["extracted"] for place in ("boxed", "hashes", "answer")
    }
    assert graded == {"boxed": "6", "hashes": "7", "answer": "5"}
    assert number(sample("6", "6"), extract="boxed").value == 0.0
    response, gold = CASES["REW19"]["input"]["response"], CASES["REW19"]["input"]["gold"]
    assert number(sample(response, gold), extract="boxed").value == 1.0


@pytest.mark.parametrize("gold", [None, "a paragraph without any answer", "3 or 4"])
def test_a_reference_without_a_number_is_a_failure_not_a_verdict(gold: str | None) -> None:
    # REW23
    with pytest.raises(FunctionFailed, match="reference answer"):
        number(sample("7", gold))


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{8} no, \boxed{6}.", "6"),
        (r"\boxed{\frac{1}{2}} and {that}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\fbox{42}", "42"),
        (r"\boxed 7", "7"),
        (r"\boxed{4", None),
        (r"\boxed{3} then \boxed{4", None),
        ("none", None),
        (r"\boxed{}", ""),
    ],
)
def test_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


def test_single_number_refuses_two() -> None:
    assert single_number("x = 5") == 5
    assert single_number("3 or 4") is None


def test_exact_compares_the_whole_response() -> None:
    assert exact(sample(" 21 ", "21")).value == 1.0
    assert exact(sample(" 21", "21"), strip=False).value == 0.0
    assert exact(sample("21.", "21")).value == 0.0
    assert exact(sample("Paris", "paris")).value == 0.0
    assert exact(sample("Paris", "paris"), casefold=True).value == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think><answer>b</answer> tail", 0.0),
        ("head <think>a</think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
    ],
)
def test_format_wants_every_tag_once_in_order(text: str, value: float) -> None:
    assert format(sample(text)).value == value


def test_length_is_the_soft_overlong_punishment() -> None:
    # arXiv:2503.14476, eq. 13, with L_max = 10 and L_cache = 4
    assert [length(sample("", tokens=n), max_tokens=10, buffer_tokens=4).value for n in (6, 7, 10, 12)] == [
        0.0,
        -0.25,
        -1.0,
        -1.0,
    ]
    assert [length(sample("", tokens=n), max_tokens=10).value for n in (10, 11)] == [0.0, -1.0]


def test_length_target_is_the_closeness_to_a_wanted_length() -> None:
    found = [length_target(sample("", tokens=n), tokens=4).value for n in (4, 3, 6, 0, 8, 99)]
    assert found == [0.0, -0.25, -0.5, -1.0, -1.0, -1.0]


def test_reasoning_gym_grades_with_the_tasks_own_rule() -> None:
    # REW21: the right value out of numbers that were not given is not an answer
    pytest.importorskip("reasoning_gym")
    given, wrong = CASES["REW21"]["input"], CASES["REW21"]["input"]["answer"]
    entry = {
        "question": "q",
        "answer": "2+3+5",
        "metadata": {"source_dataset": "countdown", "numbers": given["numbers"], "target": given["target"]},
    }
    metadata = {"reasoning_gym": "countdown", "reasoning_gym_entry": repr(entry)}
    assert reasoning_gym(sample("<think>?</think><answer>2+3+5</answer>", "", metadata=metadata)).value == 1.0
    assert (reasoning_gym(sample(f"<answer>{wrong}</answer>", "", metadata=metadata)).value or 0.0) < 0.1
    with pytest.raises(FunctionFailed, match="is not of data"):
        reasoning_gym(sample("5", "5"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fn": "number", "args": {"extrct": "boxed"}}, "no option `extrct`; did you mean `extract`"),
        ({"fn": "number", "args": {"extract": "middle"}}, "option `extract`"),
        ({"fn": "length"}, "option `max_tokens`: Field required"),
        ({"fn": "length_target", "args": {"tokens": 0}}, "option `tokens`: Input should be greater than 0"),
        ({"fn": "format", "args": {"pattern": "("}}, "option `pattern`: no regular expression"),
    ],
)
def test_wrong_options_are_refused_when_built(config: dict[str, Any], message: str) -> None:
    with pytest.raises(QuintetError, match=message.replace("(", r"\(")):
        LocalRewardService(RewardConfig.model_validate({"functions": [config]}))

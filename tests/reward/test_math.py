"""Grading of final answers: pairs with a known verdict, extraction, hostile answers."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.reward.config import RewardConfig
from quintet.reward.errors import FunctionFailed
from quintet.reward.math import check_gold, extract_answer, grade, verdict
from quintet.reward.math_answer.parse import parse
from quintet.reward.math_answer.tree import number
from quintet.reward.math_answer.value import MAX_BITS, fold
from quintet.reward.sample import Sample
from quintet.reward.service import LocalRewardService
from quintet.types import FinishReason, Group, GroupId, Prompt, Rollout

DATA = Path(__file__).parents[1] / "data"
TOWER = "9^{9^{9^{9}}}"


def pairs(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def sample(text: str, answer: str | None) -> Sample:
    return Sample("p", text, [], False, answer=answer)


@pytest.mark.parametrize("pair", pairs("math_pairs.jsonl"), ids=lambda pair: pair["id"])
def test_reported_pairs(pair: dict[str, Any]) -> None:
    response = pair["answer"] if pair["form"] == "response" else rf"So it is \boxed{{{pair['answer']}}}."
    assert verdict(sample(response, pair["gold"])).value == float(pair["expect"]), pair["why"]


@pytest.mark.parametrize("pair", pairs("math_kinds.jsonl"), ids=lambda pair: f"{pair['gold']} ? {pair['answer']}")
def test_kinds_of_answers(pair: dict[str, Any]) -> None:
    assert grade(pair["gold"], pair["answer"]) is pair["expect"]


def test_every_gold_equals_itself() -> None:
    # REW03
    golds = {pair["gold"] for name in ("math_pairs.jsonl", "math_kinds.jsonl") for pair in pairs(name)}
    assert [(gold, fault) for gold in golds if (fault := check_gold(gold)) is not None] == []


@given(st.fractions(), st.fractions())
def test_rational_numbers_are_equal_exactly_when_they_are(a: Any, b: Any) -> None:
    assert grade(f"{a}", rf"\frac{{{a.numerator}}}{{{a.denominator}}}")
    assert grade(f"{a}", f"{b}") is (a == b)


@pytest.mark.parametrize(
    ("response", "unboxed", "answer"),
    [
        (r"\boxed{8} no: \boxed{6}.", False, "6"),
        (r"<think>\boxed{3}</think> nothing", False, None),
        (r"The answer is **31**", False, None),
        (r"Final answer: **31**", True, "**31**"),
        ("It is 5 and 7", True, "7"),
        (r"\boxed{5", True, None),
        ("nothing", True, None),
    ],
)
def test_extraction(response: str, unboxed: bool, answer: str | None) -> None:
    assert extract_answer(response, unboxed=unboxed) == answer


def test_an_unboxed_answer_counts_only_where_it_is_allowed() -> None:
    # REW25
    assert verdict(sample("Final answer: **31**", "31"), unboxed=True).value == 1.0
    assert verdict(sample("Final answer: **31**", "31")).value == 0.0


@pytest.mark.parametrize("gold", [None, "", "a paragraph { without any answer"])
def test_an_unusable_reference_is_no_verdict(gold: str | None) -> None:
    # REW23
    with pytest.raises(FunctionFailed, match="reference answer of prompt p"):
        verdict(sample(r"\boxed{1}", gold))


def test_unusable_references_are_found_when_data_is_loaded() -> None:
    # REW23: with the row number
    prompts = [Prompt("a", [1], answer="1/2"), Prompt("b", [1], answer="{"), Prompt("c", [1])]
    service = LocalRewardService(RewardConfig.model_validate({"functions": [{"fn": "math"}]}))
    assert [row for row, _ in service.unusable_references(prompts)] == [1, 2]
    numbers = LocalRewardService(RewardConfig.model_validate({"functions": [{"fn": "number"}]}))
    assert numbers.unusable_references([Prompt("d", [1], answer="3 or 4")]) == [(0, "it is not one number: '3 or 4'")]


def test_verdicts_are_the_same_in_another_thread() -> None:
    # REW01
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend([grade("3.25%", r"3.25\%"), grade(r"\sqrt{8}", r"2\sqrt2")]))
    thread.start()
    thread.join()
    assert found == [True, True]


def test_an_answer_is_never_executed(tmp_path: Path) -> None:
    # REW05
    target = tmp_path / "written"
    call = f"open('{target}','w').write('\\pi') or \\pi"
    assert grade("1", call) is False
    assert grade("1", f"__import__('os').system('touch {target}')") is False
    assert not target.exists()
    assert grade(r"\pi", r"\pi") is True


@pytest.mark.parametrize(
    "answer",
    [
        *(TOWER, "10^{10^{8}}", "((((9!)!)!)!)!", r"\sin(9^{9^{9}})", r"\sqrt{2^{15000}+1}", r"e^{e^{e^{e^{9}}}}"),
        *("(" * 900 + "5", "-" * 1900 + "5", "1+" * 900 + "1", r"\frac{1}{1+" * 100, r"(99999.5)!", "5" * 3000),
    ],
)
def test_hostile_answers_are_wrong_without_being_computed(answer: str) -> None:
    assert grade("5", answer) is False


def test_powers_are_left_standing_beyond_the_limit() -> None:
    assert fold(parse("2^{100}")) == number(2**100)
    assert fold(parse(f"2^{{{MAX_BITS}}}")).kind == "pow"
    assert grade("10^{100000000}", "10^{10^8}") is True


def test_power_towers_beside_a_plain_answer_in_the_pool() -> None:
    # REW02: 20 towers, then one right answer; 4 workers
    gid = GroupId("p")
    texts = [rf"\boxed{{{TOWER}}}"] * 20 + [r"\boxed{5}"]
    rollouts = [Rollout(gid, i, [1], [2], t, [0.0], [1], [], FinishReason.STOP) for i, t in enumerate(texts)]
    service = LocalRewardService(RewardConfig.model_validate({"functions": [{"fn": "math"}], "workers": 4}))
    try:
        [scores] = asyncio.run(service.score([Group(gid, Prompt("p", [1], answer="5"), rollouts)]))
    finally:
        service.close()
    assert [score.reward for score in scores] == [0.0] * 20 + [1.0]
    assert scores[20].info == {"math": {"extracted": "5"}}

"""Grading of final answers: pairs with a known verdict, extraction, hostile answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.reward.config import RewardConfig
from quintet.reward.errors import FunctionFailed
from quintet.reward.math import check_gold, extract_answer, grade, grade_rows, judge, verdict
from quintet.reward.math_answer.parse import parse
from quintet.reward.math_answer.second import SecondOpinion, concerns
from quintet.reward.math_answer.tree import names, number
from quintet.reward.math_answer.value import MAX_BITS, fold
from quintet.reward.sample import Sample
from quintet.reward.service import LocalRewardService
from quintet.types import FinishReason, Group, GroupId, Prompt, QuintetError, Rollout

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
        (r"Final answer: **31**", True, "31"),
        ("It is 5 and 7", True, "7"),
        (r"\boxed{5", True, None),
        ("nothing", True, None),
        # boxes: the last one, wherever its braces stand; never one that is cut, empty or in the thinking part
        (r"\boxed{\frac{1}{2}} \quad {x}", False, r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", False, r"\boxed{5}"),
        (r"\boxed 7", False, "7"),
        (r"\boxed {12}", False, "12"),
        (r"\fbox{42}", False, "42"),
        (r"\boxed{8} then \boxed{", False, None),
        (r"\boxed{8} then \boxed {6", False, None),
        (r"\boxed{8} then \boxed{}", False, ""),
        (r"$$\boxed{\begin{pmatrix}1\\2\end{pmatrix}}$$", False, r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\boxed{\{1,2\}}", False, r"\{1,2\}"),
        (r"<think>\boxed{3}", False, None),
        (r"<think>\boxed{3}", True, None),
        (r"a</think>b<think>\boxed{3}</think> \boxed{4}", False, "4"),
        (r"\boxed{5} <think> or \boxed{6}?", False, "5"),
        ("<thinking>the answer is 3</thinking>\nThe answer is 4.", True, "4"),
        # without a box, where that is allowed
        ("some work\n#### 72", True, "72"),
        ("some work\n#### 72", False, None),
        ("The answer is 5. Then 6 more.", True, "5"),
        ("The final answer is: $12$", True, "$12$"),
        ("**Answer:** 42", True, "42"),
        ("Answer:\n42", True, "42"),
        ("first the answer is 3, then the answer is 4", True, "4"),
        ("答案是 12。", True, "12"),
        ("so we get 3, 4", True, "4"),
        ("it costs $1,200 in all", True, "$1,200"),
    ],
)
def test_extraction(response: str, unboxed: bool, answer: str | None) -> None:
    assert extract_answer(response, unboxed=unboxed) == answer


def test_a_reference_may_be_a_whole_solution() -> None:
    assert grade("She sold 48/2 = 24 clips.\n#### 72", "72") is True
    assert grade(r"Hence $x = \boxed{\frac{1}{2}}$.", "0.5") is True


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
        *("(" * 10_000 + "5" + ")" * 10_000, "{" * 990 + "5" + "}" * 990, "10!" + "!" * 900),
        *(
            r"10^{10^{10}}",
            r"2^{99999999999}",
            r"(10^{9})!",
            r"\binom{10^{9}}{10^{8}}",
            r"\lfloor 10^{10^{10}} \rfloor",
        ),
        *(
            r"\gcd(10^{10^{9}}, 7)",
            r"\sqrt[99999]{10^{99999}}",
            r"x^{x^{x^{x^{99}}}}",
            "9" * 400 + "!",
            r"1e9999",
            "0." + "1" * 1900,
        ),
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
    assert scores[20].info == {"math": {"extracted": "5", "reason": "the same text"}}


# ---- what is left to math-verify -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("55", r"\sum_{k=1}^{10} k", True),
        ("56", r"\sum_{k=1}^{10} k", False),
        (r"\frac{1}{3}", r"\int_0^1 x^2\,dx", True),
    ],
)
def test_sums_and_integrals_are_left_to_math_verify(
    gold: str, answer: str, right: bool, math_verify: SecondOpinion
) -> None:
    assert judge(gold, answer) == (False, "the answer cannot be read")
    assert judge(gold, answer, math_verify) == (right, "by math-verify")


@pytest.fixture(scope="module")
def math_verify() -> Iterator[SecondOpinion]:
    second = SecondOpinion(60.0)
    yield second
    second.close()


def test_what_math_verify_cannot_finish_is_wrong() -> None:
    second = SecondOpinion(0.05)
    try:
        assert judge("5", r"\sum_{k=1}^{9999} \sin(k^2)", second) == (False, "by math-verify")
    finally:
        second.close()


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("17", r"\ge 17"), ("17", r"\boxed{17"), ("5", r"\sum 9^{9^{9^9}}"), ("5", r"\int " + "x" * 500)],
)
def test_other_texts_and_towers_are_not_worth_asking_about(gold: str, answer: str) -> None:
    assert concerns(gold, answer) is False


# ---- rows of a file --------------------------------------------------------------------------------


def test_rows_are_graded_with_reasons() -> None:
    rows: list[dict[str, Any]] = [
        {"gold": "1/2", "answer": "0.5", "expect": True},
        {"gold": "5\\text{ cm}", "answer": "5\\text{ m}", "form": "final", "expect": True},
        {"gold": "8", "answer": r"\boxed{8} no, \boxed{6}", "form": "response", "expect": False},
        {"gold": "{", "answer": "1"},
    ]
    graded = list(grade_rows(rows))
    assert [g.right for g in graded] == [True, False, False, False]
    assert [g.passed for g in graded] == [True, False, True, True]
    assert [g.reason for g in graded[:3]] == ["equal in value", "different units: m is not cm", "another number"]
    assert "the reference answer of prompt 4 cannot be graded" in graded[3].reason
    with pytest.raises(QuintetError, match="row 2: `form` is 'boxed', expected final or response"):
        list(grade_rows([rows[0], {"gold": "1", "answer": "1", "form": "boxed"}]))


# ---- properties --------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *names(r"\frac \sqrt \left( \right) { } ( ) [ ] , ; : ^ _ + - * / = < \le \cup \pm \pi \infty x y n 2 10 0.5"),
        *names(r"1,000 \% \$ ! | \in \{ \} & \\ \sin \log \overline{3} \circ e i ... \ldots \over \text{cm} \sum"),
        *(r"\text{ or }", r"\begin{pmatrix}", r"\end{pmatrix}"),
    ]
)
ANSWERS = st.lists(PIECES, max_size=12).map(" ".join) | st.text(max_size=40)


@settings(deadline=None, max_examples=100)
@given(ANSWERS, ANSWERS)
def test_any_two_texts_have_a_verdict_that_does_not_depend_on_the_side(a: str, b: str) -> None:
    assert judge(a, b).right == judge(b, a).right


@settings(deadline=None, max_examples=50)
@given(ANSWERS)
def test_what_can_be_read_equals_itself(text: str) -> None:
    assert grade(text, text) is (text.strip() != "")


@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["{}", "{:,}", "${}$", r"\boxed{{{}}}", "x = {}", "{}.0", r"\text{{{}}}"]),
)
def test_an_integer_is_itself_in_any_dress_and_not_its_neighbour(value: int, dress: str) -> None:
    assert grade(str(value), dress.format(value)) is True
    assert grade(str(value + 1), dress.format(value)) is False

r"""Grading a final answer of mathematics against a reference, by value.

Conventions:
- The answer is the last `\boxed{}` (or `\fbox{}`) after the thinking part; an earlier one is withdrawn, one that is cut
  off or empty is no answer. `unboxed: true` takes, in a response without any box, what follows the last `####`, else
  the last "answer is" or "answer:", else the last number.
- A reference may be a whole solution: its last box, or what follows its `####`, is meant.
- Typesetting does not count: styles, spacing, `\dfrac`, `\left`, grouping commas, a final full stop, markdown stars.
- Numbers are equal by exact value: 0.5 and 1/2, 5! and 120, 10% and 1/10; there is no tolerance, near zero or
  elsewhere. A decimal of at least twelve digits may stand for a repeating fraction that it agrees with.
- Expressions are equal when they agree at fixed irrational sample points to fifteen digits. `\log` is natural.
- A bare comma list is unordered, parentheses an ordered tuple or an open interval, braces a set. Plus-minus is
  two values.
- A unit, degree or currency sign may be missing on one side; two different units never match.
- A digit followed by a proper fraction is a mixed number. `52_8` is a number in base 8.
- `x = 5` is 5; equations are equal up to a constant factor; inequalities in one unknown are their solution sets.
- Ratios are ordered, and equal in proportion; `12:00` is a time of day.
- A choice with its value, `(B) 12`, is its letter or its value, whichever the reference gives.
- A sum, product, integral or limit that stands unevaluated is left to math-verify, see `math_answer/second.py`; the
  reference's words are compared as words, without regard to case.

An answer is data: nothing is evaluated as code. Work is bounded (power towers are compared without being built), no
signal or timer is used, and the verdict is the same in any thread.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from quintet.reward.errors import FunctionFailed
from quintet.reward.extract import after_hashes, after_thinking, boxes, last_box
from quintet.reward.math_answer.compare import equal
from quintet.reward.math_answer.parse import parse
from quintet.reward.math_answer.prepare import prepare
from quintet.reward.math_answer.second import SecondOpinion, concerns
from quintet.reward.math_answer.spelling import option, readings, right_side, squeezed
from quintet.reward.math_answer.tree import Node, Unreadable, described
from quintet.reward.sample import Sample, Verdict
from quintet.types import QuintetError

Compare = Callable[[str, str], bool]
_PLAIN_NUMBER = re.compile(r"\s*([+-]?)(?:\\\$)?((?:[1-9]\d{0,2}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?)\s*", re.ASCII)
_LEAD = re.compile(r"(?:(?:answer|result)\b[*_\s]*(?:is|:|=|：)|(?:答案|结果)(?:是|为|:|：))[:：*_\s]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[\w)}\]%$])[.。](?=\s+[A-Z\u4e00-\u9fff]|$)")
_LAST_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?%?")


class Ruling(NamedTuple):
    """A verdict with the reason for it."""

    right: bool
    reason: str


class MathRule:
    """The rule reward `math`, for the life of a worker: math-verify is started when an answer needs it."""

    def __init__(self, second_opinion_s: float = 3.0) -> None:
        self._second = SecondOpinion(second_opinion_s)

    def __call__(self, sample: Sample, *, unboxed: bool = False, second_opinion: bool = True) -> Verdict:
        return verdict(sample, unboxed=unboxed, second=self._second if second_opinion else None)

    def close(self) -> None:
        self._second.close()


def verdict(sample: Sample, *, unboxed: bool = False, second: Compare | None = None) -> Verdict:
    """1 when the final answer equals the reference, by the conventions above. Raises FunctionFailed for a reference
    that cannot be graded."""
    fault = "there is none" if sample.answer is None else check_gold(sample.answer)
    if sample.answer is None or fault is not None:
        raise FunctionFailed(f"the reference answer of prompt {sample.prompt_id} cannot be graded: {fault}")
    answer = extract_answer(sample.text, unboxed=unboxed)
    if answer is None or not answer.strip():
        return Verdict(0.0, {"reason": "no final answer"})
    ruling = judge(sample.answer, answer, second)
    return Verdict(float(ruling.right), {"extracted": answer[:80], "reason": ruling.reason})


def extract_answer(response: str, *, unboxed: bool = False) -> str | None:
    """The final answer of a response; None when there is none."""
    text = after_thinking(response)
    found = list(boxes(text))
    if found or not unboxed:
        return found[-1] if found else None
    if (after := after_hashes(text)) is not None:
        return after
    leads = list(_LEAD.finditer(text))
    if leads and (line := text[leads[-1].end() :].split("\n", 1)[0].rstrip("*_ ")):
        return _SENTENCE_END.split(line)[0]
    numbers = _LAST_NUMBER.findall(text.replace("\u2212", "-"))
    return numbers[-1].rstrip(",") if numbers else None


@functools.lru_cache(maxsize=4096)  # a group, and every epoch, asks for the same references again
def check_gold(gold: str) -> str | None:
    """Why a reference cannot be used: None when it can be read and equals itself."""
    bare = _bare(gold)
    if not bare.strip():
        return "it is empty"
    if not _read(bare) and not concerns(bare, bare):
        return f"it is no mathematical answer: {gold!r:.60}"
    return None if grade(gold, gold) else f"it does not equal itself: {gold!r:.60}"


def grade(gold: str, answer: str) -> bool:
    """Whether the two final answers (a box around either does not count) are the same."""
    return judge(gold, answer).right


def judge(gold: str, answer: str, second: Compare | None = None) -> Ruling:
    """Compare two final answers. `second`: asked about sums, products, integrals and limits left unevaluated."""
    gold, answer = _bare(gold), _bare(answer)
    if not answer.strip() or not gold.strip():
        return Ruling(False, "nothing to compare")
    if squeezed(gold) == squeezed(answer):
        return Ruling(True, "the same text")
    numbers = _plain_number(gold), _plain_number(answer)
    if None not in numbers and (numbers[0] == numbers[1] or not ("," in gold and "," in answer)):  # two lists?
        return Ruling(True, "equal in value") if numbers[0] == numbers[1] else Ruling(False, "another number")
    letters = [None if found is None else found[0] for found in (option(gold), option(answer))]
    if None not in letters:
        return Ruling(letters[0] == letters[1], "two choices with their letters")
    golds, answers = _read(gold), _read(answer)
    if any(_same(g, a) for g in golds for a in answers):
        return Ruling(True, "equal in value")
    if second is not None and not (golds and answers) and concerns(gold, answer):
        return Ruling(second(gold, answer), "by math-verify")
    return Ruling(False, _difference(golds, answers))


def _plain_number(text: str) -> Fraction | None:
    """The fast path of most answers: an integer or decimal, perhaps with grouping commas or a dollar sign."""
    match = _PLAIN_NUMBER.fullmatch(text)
    return None if match is None else Fraction(match[1] + match[2].replace(",", ""))


def _difference(golds: Sequence[Node], answers: Sequence[Node]) -> str:
    if not golds or not answers:
        return "the answer cannot be read" if golds else "the reference cannot be read"
    gold, answer = golds[0], answers[0]
    if gold.kind == answer.kind == "unit" and gold.text != answer.text:
        return f"different units: {answer.text} is not {gold.text}"
    a, b = described(answer), described(gold)
    return f"{a} is not the reference's {b}" if a != b else f"another {a} than the reference's"


def _same(gold: Node, answer: Node) -> bool:
    try:
        return equal(gold, answer)
    except (Unreadable, RecursionError):
        return False


def _bare(text: str) -> str:
    """Without a box around it, or the solution before it."""
    boxed = last_box(text)
    if boxed is not None:
        return boxed
    return after_hashes(text) or text


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> tuple[Node, ...]:
    """What the text may mean: as it stands, with its commas kept, and of a choice with its value either."""
    if (choice := option(text)) is not None:
        letter, value = choice
        return (parse(letter), *_read(value))
    nodes: list[Node] = []
    with contextlib.suppress(Unreadable, RecursionError):
        for reading in readings(text):
            nodes.append(_parsed(reading))
    return tuple(nodes)


def _parsed(text: str) -> Node:
    try:
        node = parse(text)
    except Unreadable:
        value = right_side(text)
        if value is None:
            raise
        node = parse(value)
    prepare(node)
    return node


class Graded(NamedTuple):
    """What became of one row; `expect` is what the row itself says, if it does."""

    right: bool
    reason: str
    expect: bool | None

    @property
    def passed(self) -> bool:
        return self.expect is None or self.right == self.expect


def grade_rows(
    rows: Iterable[Mapping[str, Any]], *, unboxed: bool = False, second_opinion: bool = True
) -> Iterator[Graded]:
    """Grade rows of `gold`, `answer`, `form` (`final`, the default: the answer itself, or `response`: a text that
    holds it) and optional `expect`, one after the other.

    Raises QuintetError, naming the row (from 1), for a row without gold or answer or of another form. A reference that
    cannot be graded is wrong, with the reason.
    """
    rule = MathRule(second_opinion_s=20.0)  # nothing waits for an audit
    try:
        for number, row in enumerate(rows, 1):
            yield _grade_row(number, row, rule, unboxed, second_opinion)
    finally:
        rule.close()


def _grade_row(number: int, row: Mapping[str, Any], rule: MathRule, unboxed: bool, second_opinion: bool) -> Graded:
    gold, answer, form, expect = (row.get(key) for key in ("gold", "answer", "form", "expect"))
    if not isinstance(gold, str) or not isinstance(answer, str):
        raise QuintetError(f"row {number}: `gold` and `answer` must be texts")
    if form not in (None, "final", "response"):
        raise QuintetError(f"row {number}: `form` is {form!r}, expected final or response")
    if expect is not None and not isinstance(expect, bool):
        raise QuintetError(f"row {number}: `expect` is {expect!r}, expected true or false")
    text = answer if form == "response" else rf"\boxed{{{answer}}}"
    try:
        result = rule(Sample(str(number), text, [], False, answer=gold), unboxed=unboxed, second_opinion=second_opinion)
    except FunctionFailed as error:
        return Graded(False, error.message, expect)
    return Graded(result.value == 1.0, str(result.info["reason"]), expect)

r"""Grading a final answer of mathematics against a reference, by value.

Conventions:
- The answer is the last `\boxed{}` (or `\fbox{}`) after the thinking part; an earlier one is withdrawn, one that is cut
  off or empty is no answer. `unboxed: true` takes, without a box, what follows the last "answer is" or "answer:" of the
  last lines, or the last number.
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

An answer is data: nothing is evaluated as code. Work is bounded (power towers are compared without being built), no
signal or timer is used, and the verdict is the same in any thread.
"""

from __future__ import annotations

import re

from quintet.reward.errors import FunctionFailed
from quintet.reward.extract import after_thinking, last_box
from quintet.reward.math_answer.compare import equal
from quintet.reward.math_answer.parse import parse
from quintet.reward.math_answer.prepare import prepare
from quintet.reward.math_answer.text import readings
from quintet.reward.math_answer.tree import Node, Unreadable
from quintet.reward.sample import Sample, Verdict

_LEAD = re.compile(r"(?:answer|result)\s*(?:is|:|=)+\s*(?P<answer>[^\n]+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")


def verdict(sample: Sample, *, unboxed: bool = False) -> Verdict:
    """The rule reward `math`: 1 when the final answer equals the reference, by the conventions above."""
    fault = "there is none" if sample.answer is None else check_gold(sample.answer)
    if sample.answer is None or fault is not None:
        raise FunctionFailed(f"the reference answer of prompt {sample.prompt_id} cannot be graded: {fault}")
    answer = extract_answer(sample.text, unboxed=unboxed)
    if answer is None or not answer.strip():
        return Verdict(0.0, {"reason": "no final answer"})
    return Verdict(float(grade(sample.answer, answer)), {"extracted": answer[:80]})


def extract_answer(response: str, *, unboxed: bool = False) -> str | None:
    """The final answer of a response; None when there is none."""
    text = after_thinking(response)
    boxed = last_box(text)
    if boxed is not None or not unboxed or r"\boxed{" in text:
        return boxed
    leads = list(_LEAD.finditer(text))
    if leads:
        return leads[-1]["answer"]
    found = _LAST_NUMBER.findall(text.replace("\u2212", "-"))
    return found[-1] if found else None


def check_gold(gold: str) -> str | None:
    """Why a reference cannot be used: None when it can be read and equals itself."""
    if not _bare(gold).strip():
        return "it is empty"
    nodes = _read(_bare(gold))
    if not nodes:
        return f"it is no mathematical answer: {gold!r:.60}"
    return None if grade(gold, gold) else f"it does not equal itself: {gold!r:.60}"


def grade(gold: str, answer: str) -> bool:
    """Whether the two final answers (a box around either does not count) are the same."""
    gold, answer = _bare(gold), _bare(answer)
    if not answer.strip() or not gold.strip():
        return False
    if _squeezed(gold) == _squeezed(answer):
        return True
    return any(_same(g, a) for g in _read(gold) for a in _read(answer))


def _same(gold: Node, answer: Node) -> bool:
    try:
        return equal(gold, answer)
    except (Unreadable, RecursionError):
        return False


def _bare(text: str) -> str:
    boxed = last_box(text)
    return text if boxed is None else boxed


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _read(text: str) -> list[Node]:
    nodes: list[Node] = []
    try:
        for reading in readings(text):
            nodes.append(parse(reading))
            prepare(nodes[-1])
    except (Unreadable, RecursionError):
        return nodes[:1] if nodes else []
    return nodes

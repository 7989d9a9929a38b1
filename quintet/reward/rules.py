"""The built-in rule rewards: `rule(sample, *, option=...) -> Verdict`.

A rule compares with `sample.answer`; a sample without a usable reference raises `FunctionFailed` (the sample is
excluded), it is never graded 0. What the candidate did wrong is a verdict: 0 with the reason in `info`.
Most run where they are called, being linear in the response; `needs_pool` names those that are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal

from annotated_types import Gt  # comes with pydantic, whose own Field would cost a worker its start-up

from quintet.reward.errors import FunctionFailed
from quintet.reward.extract import after_hashes, after_thinking, answer_tag, last_box, numbers, single_number
from quintet.reward.sample import Sample, Verdict

Rule = Callable[..., Verdict]
Extract = Literal["last", "boxed", "hashes", "answer"]


def number(sample: Sample, *, extract: Extract = "last", rel_tol: float = 0.0) -> Verdict:
    """1 when the response's final number equals the reference.

    `extract`: where the number stands: `last` (the last one after the thinking part), `boxed` (the last box),
    `hashes` (after `####`), `answer` (the last `<answer>` tag). Integers match exactly, always; `rel_tol` is a
    relative tolerance for a reference that is not an integer.
    """
    gold = _gold_number(sample)
    where = {"boxed": last_box, "hashes": after_hashes, "answer": answer_tag}
    text = after_thinking(sample.text)
    if extract == "last":
        found = numbers(text)
        value = found[-1] if found else None
    else:
        part = where[extract](text)
        value = single_number(part) if part is not None else None
    if value is None:
        return Verdict(0.0, {"reason": f"no number ({extract})"})
    return Verdict(float(_numbers_equal(gold, value, rel_tol)), {"extracted": _shown(value)})


def exact(sample: Sample, *, strip: bool = True, casefold: bool = False) -> Verdict:
    """1 when the whole response is the reference, character by character."""
    gold, text = _gold_text(sample), sample.text
    if strip:
        gold, text = gold.strip(), text.strip()
    if casefold:
        gold, text = gold.casefold(), text.casefold()
    return Verdict(float(text == gold))


def format(sample: Sample, *, pattern: str | None = None, tags: tuple[str, ...] = ("think", "answer")) -> Verdict:
    """1 when the whole response has the wanted form.

    With `pattern`: the regular expression matches all of it (`.` matches line ends). Without: the response is
    exactly `<a>...</a> <b>...</b>` for the `tags` a, b, ...: each once, in order, nothing outside.
    """
    if pattern is not None:
        return Verdict(float(re.fullmatch(pattern, sample.text, re.DOTALL) is not None))
    fault = _tags_fault(sample.text.strip(), tags)
    return Verdict(1.0) if fault is None else Verdict(0.0, {"reason": fault})


def length(sample: Sample, *, max_tokens: int, buffer_tokens: int = 0) -> Verdict:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): 0 up to `max_tokens - buffer_tokens` response
    tokens, falling linearly to -1 at `max_tokens`, -1 beyond."""
    over = sample.length - (max_tokens - buffer_tokens)
    if over <= 0:
        return Verdict(0.0)
    return Verdict(-min(over / buffer_tokens, 1.0) if buffer_tokens else -1.0)


def length_target(sample: Sample, *, tokens: Annotated[int, Gt(0)]) -> Verdict:
    """Closeness to a wanted length: 0 at `tokens` response tokens, falling linearly with the distance to -1 at none
    and at twice as many, -1 beyond (the form of L1-Exact's penalty, arXiv:2503.04697, relative and bounded)."""
    return Verdict(-min(abs(len(sample.response_ids) - tokens) / tokens, 1.0))


def reasoning_gym(sample: Sample) -> Verdict:
    """The task's own score, 0 to 1, of the last `<answer>` tag, or of the whole response without one.

    For prompts of `data.source: reasoning_gym:NAME`, whose entry travels in `Prompt.metadata`.
    """
    from quintet.data.reasoning import score_answer  # brings reasoning-gym, an extra

    if "reasoning_gym" not in sample.metadata:
        raise FunctionFailed(f"prompt {sample.prompt_id} is not of data.source reasoning_gym:NAME")
    text = after_thinking(sample.text)
    tagged = answer_tag(text)
    return Verdict(score_answer(sample.metadata, text.strip() if tagged is None else tagged))


def math(sample: Sample, *, unboxed: bool = False, second_opinion: bool = True) -> Verdict:
    """1 when the final answer equals the reference in value; `quintet.reward.math` lists the conventions.

    `unboxed`: without a box, take what follows `####` or "the answer is", or the last number. `second_opinion`: ask
    math-verify about sums, products, integrals and limits that are left unevaluated; off, such an answer is wrong.
    """
    rule = make_rule("math")
    return rule(sample, unboxed=unboxed, second_opinion=second_opinion)


def make_rule(name: str) -> Rule:
    """The rule for a worker's life: `math` keeps a helper process between its calls, the others keep nothing."""
    if name == "math":
        from quintet.reward.math import MathRule  # brings mpmath, which other rules do without

        return MathRule()
    return RULES[name]


def environment(sample: Sample) -> Verdict:
    """What the environment gave for the episode; abstains where it leaves the verdict to other functions."""
    if sample.episode is None:
        return Verdict(None)
    return Verdict(sample.episode.reward, {"outcome": sample.episode.outcome})


def reference_fault(rule: str, answer: str | None) -> str | None:
    """Why a sample with this reference answer could never be graded by `rule`; None when it could."""
    if rule not in ("number", "exact", "math"):
        return None
    if answer is None:
        return "there is no reference answer"
    if rule == "number" and gold_number(answer) is None:
        return f"it is not one number: {answer!r:.60}"
    if rule == "math":
        from quintet.reward.math import check_gold

        return check_gold(answer)
    return None


RULES: dict[str, Rule] = {
    "number": number,
    "exact": exact,
    "format": format,
    "length": length,
    "length_target": length_target,
    "math": math,
    "reasoning_gym": reasoning_gym,
    "environment": environment,
}


# imported when the rule is loaded, so that a missing extra is found early and no call pays for the import
IMPORTS = {"math": "quintet.reward.math", "reasoning_gym": "reasoning_gym"}


# short and bounded, so that the samples of a group may share a call and its limit
BATCHED = frozenset({"math"})


def needs_pool(rule: str, args: Mapping[str, Any]) -> bool:
    """Whether a call may take long on hostile input, and so belongs into the process pool."""
    return rule in ("math", "reasoning_gym") or args.get("pattern") is not None


def _tags_fault(text: str, tags: tuple[str, ...]) -> str | None:
    position = 0
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if text.count(start) != 1 or text.count(end) != 1:
            return f"{start}...{end} must stand there once"
        if not text[position:].lstrip().startswith(start) or text.index(end) < text.index(start):
            return f"{start} is not where it belongs"
        position = text.index(end) + len(end)
    return "text after the last tag" if text[position:] else None


def _gold_text(sample: Sample) -> str:
    if sample.answer is None:
        raise FunctionFailed(f"prompt {sample.prompt_id} has no reference answer (data.columns.answer)")
    return sample.answer


def gold_number(answer: str) -> Fraction | str | None:
    """The number of a reference answer: after `####`, in its box, or all of it."""
    return single_number(after_hashes(answer) or last_box(answer) or answer)


def _gold_number(sample: Sample) -> Fraction | str:
    gold = _gold_text(sample)
    value = gold_number(gold)
    if value is None:
        raise FunctionFailed(f"the reference answer of prompt {sample.prompt_id} is not one number: {gold!r:.60}")
    return value


def _numbers_equal(gold: Fraction | str, value: Fraction | str, rel_tol: float) -> bool:
    if isinstance(gold, str) or isinstance(value, str) or gold.denominator == 1:
        return gold == value
    return abs(gold - value) <= Fraction(rel_tol) * abs(gold)


def _shown(value: Fraction | str) -> Any:
    return str(value)[:40]

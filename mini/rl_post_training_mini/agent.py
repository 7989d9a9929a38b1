"""Several turns with a tool: the trajectory holds tokens of the model and of the tool; only the model's carry loss.

Stands for: agentic RL (tool calls, environments). Grown-up version: loss_mask in quintet/types.py, honoured by
quintet/train/worker.py; environments live under quintet/rollout/.

The task: add two or three digits ("3 4 2 ?"). A bigram cannot add, a calculator can. The right trajectory for
3 + 4 + 2, with the tool's tokens in brackets: CALL [=7 MORE] CALL [=9] 9 ∎. The tool adds the next number at every
call and says MORE while numbers are left; the model has to learn to call, to call again, to copy, and to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from .model import EOS, TinyPolicy
from .rollout import Rollout

ASK, CALL, MORE, RESULT_0 = 12, 13, 14, 15  # RESULT_0 + d is the tool's "=d"
AGENT_VOCAB_SIZE = RESULT_0 + 10
GOOD_HABITS = {
    ASK: CALL,
    MORE: CALL,
    **{RESULT_0 + d: d for d in range(10)},
    **dict.fromkeys(range(10), EOS),
}
AGENT_PROMPTS = [(*ns, ASK) for k in (2, 3) for ns in product(range(1, 10), repeat=k) if sum(ns) <= 9]


def create_agent(seed: int, skill: float = 3.2) -> TinyPolicy:
    """A policy that knows the format by half: at each place it does the right thing about every second time."""
    return TinyPolicy.create(seed, skill, GOOD_HABITS, AGENT_VOCAB_SIZE)


def calculator(prompt: Sequence[int], response: Sequence[int]) -> list[int]:
    """What the tool says after the model's last token: nothing, unless that was a CALL."""
    if response[-1] != CALL:
        return []
    numbers, calls = prompt[:-1], list(response).count(CALL)
    result = RESULT_0 + sum(numbers[: calls + 1])
    return [result, MORE] if calls + 1 < len(numbers) else [result]


def solved(prompt: Sequence[int], response: Sequence[int]) -> float:
    """1 if the response ends with the sum and the end token, else 0."""
    return float(list(response[-2:]) == [sum(prompt[:-1]), EOS])


def trajectory_text(rollout: Rollout) -> str:
    """The response as text, with the tool's tokens in brackets."""
    names = {EOS: "∎", ASK: "?", CALL: "CALL", MORE: "MORE", **{RESULT_0 + d: f"={d}" for d in range(10)}}
    words = [names.get(t, str(t)) for t in rollout.response]
    return " ".join(w if own else f"[{w}]" for w, own in zip(words, rollout.loss_mask, strict=True))

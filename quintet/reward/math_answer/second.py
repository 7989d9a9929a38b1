r"""What our own reader leaves to math-verify: an answer with a sum, product, integral or limit that stands unevaluated.

math-verify (and sympy below it) decides in a process of its own, which has a limit of memory and is killed when it
takes too long: such an answer is then wrong. Everything else that we cannot read is wrong without asking: math-verify's
guesses from the digits that it finds there were wrong more often than right.
"""

from __future__ import annotations

import re
import threading

from quintet.reward.errors import CallTimeout, FunctionFailed, WorkerDied
from quintet.reward.loading import FunctionSource
from quintet.reward.sample import Sample
from quintet.reward.worker_process import Template, WorkerProcess

MAX_CHARS = 400
_OPERATOR = re.compile(r"\\(?:sum|prod|i?i?int|oint|lim)(?![a-zA-Z])")
_TOWER = re.compile(r"\d{5,}\s*!|!\s*!|\^[^+\-*/=]*\^[^+\-*/=]*\^|\^\s*\{?\s*\d{5,}")


def concerns(gold: str, answer: str) -> bool:
    """Whether the pair is one for math-verify: an operator on either side, and nothing that only wastes its time."""
    if not (_OPERATOR.search(gold) or _OPERATOR.search(answer)):
        return False
    return all(len(text) <= MAX_CHARS and not _TOWER.search(text) for text in (gold, answer))


class SecondOpinion:
    """math-verify in a process that starts with the first question. Usable from several threads, one at a time."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._template: Template | None = None

    def __call__(self, gold: str, answer: str) -> bool:
        """Raises FunctionFailed when the process itself is broken; a question that takes too long is answered no."""
        with self._lock:
            if self._template is None:
                source = FunctionSource("math_verify", "quintet.reward.math_answer.asked:compare")
                self._template = Template([source])
                self._slot = WorkerProcess(self._template)
            try:
                reply = self._slot.call(0, [Sample("", answer, [], False, answer=gold)], self._limit_s)
            except (CallTimeout, WorkerDied):  # too slow, or beyond its memory
                return False
        if reply.failed is not None:
            raise FunctionFailed(f"math-verify: {reply.failed.message}")
        return bool(reply.verdicts and reply.verdicts[0].value)

    def close(self) -> None:
        with self._lock:
            if self._template is not None:
                self._slot.close()
                self._template.close()
                self._template = None

"""What can go wrong inside the reward service."""

from __future__ import annotations

from quintet.types import FailureKind, QuintetError


class RewardError(QuintetError):
    """A reward function failed at run time in a way that stops the run. Names the function and the reason."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(f"reward function `{function}`: {reason}")
        self.function = function
        self.reason = reason


class FunctionFailed(Exception):
    """A call of a reward function gave no usable values. `message` leaves the function's name to whoever reports it."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.GRADER, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.retryable = retryable


class CallTimeout(FunctionFailed):
    """The call ran into its limit; its worker was killed (a process) or abandoned (a thread)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FailureKind.TIMEOUT)


class WorkerDied(FunctionFailed):
    """The worker process ended in the middle of a call (a crash, `os._exit`, the out-of-memory killer)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class MissingColumn(FunctionFailed):
    """The function requires a parameter for which the data has no column: a mistake in the recipe, it always stops."""

"""The wire types: what crosses a seam between two modules, and nothing else.

Every type is a flat msgspec struct, so that it can be journaled, sent over a socket or printed as it
is. Token-level lists always have the length of `response_ids`; floats that came from an engine are
exactly representable in float32, so that journaling them as float32 loses no bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Protocol

import msgspec


class QuintetError(Exception):
    """A user's mistake, said in one to three lines: what, where, how to mend. The CLI exits with code 2."""


class StepAbandoned(Exception):
    """The run is to stop, and the step in progress has not changed a weight: a resumed run does it again, whole."""


class FailureKind(StrEnum):
    """Where something that is *not* the policy's doing went wrong."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    SANDBOX = "sandbox"
    GRADER = "grader"
    TRANSPORT = "transport"
    TIMEOUT = "timeout"
    UNSCORED = "unscored"


class Failure(msgspec.Struct, frozen=True):
    """An infrastructure fault. It travels beside a score, never as a reward of 0."""

    kind: FailureKind
    message: str
    retryable: bool = False


class GroupId(msgspec.Struct, frozen=True, order=True):
    """Identity of one unit of work. The same prompt drawn twice is two groups; a dropped one returns as its next
    attempt."""

    prompt_id: str
    epoch: int = 0
    occurrence: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.prompt_id}/e{self.epoch}.o{self.occurrence}.a{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> GroupId:
        """Inverse of `str`; raises ValueError on anything else."""
        prompt_id, _, rest = text.rpartition("/")
        epoch, occurrence, attempt = rest.split(".")
        return cls(prompt_id, int(epoch[1:]), int(occurrence[1:]), int(attempt[1:]))

    def next_attempt(self) -> GroupId:
        return GroupId(self.prompt_id, self.epoch, self.occurrence, self.attempt + 1)


class Prompt(msgspec.Struct):
    """One question. `token_ids` is what the engine is fed; `messages` or `text` is where it came from."""

    id: str
    token_ids: list[int]
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    task_type: str = "math"
    answer: str | None = None
    test_cases: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = {}


class SamplingParams(msgspec.Struct, frozen=True):
    """How to sample. `temperature` 0 is greedy; `top_k` 0, `top_p` 1.0 and `min_p` 0.0 mean no truncation.

    `seed` is the run's random seed: the draw of a token is keyed by (seed, group id, sample index,
    position), never by its place in a batch. A call that goes on with a trajectory (its next turn, or its rest on
    another worker) gives the tokens so far as part of the prompt and says with `first_sample` and `first_position`
    whose trajectory it is and how many response tokens it has, so that no draw is used twice.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    first_sample: int = 0
    first_position: int = 0
    min_p: float = 0.0

    def greedy(self) -> SamplingParams:
        """One answer, at every token the likeliest; limits and stops as here."""
        return msgspec.structs.replace(self, n=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


class FinishReason(StrEnum):
    STOP = "stop"  # an EOS id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context ran out
    ABORTED = "aborted"
    FAILED = "failed"


class VersionRun(msgspec.Struct, frozen=True):
    """`length` consecutive response tokens were sampled with weight version `version`."""

    version: int
    length: int


class SampledToken(msgspec.Struct, frozen=True):
    """One token as it leaves the sampler, for those who want it before its rollout ends."""

    sample_index: int
    token_id: int
    logprob: float
    version: int


class Episode(msgspec.Struct):
    """How a multi-turn rollout went, as its environment saw it.

    `outcome` says why it ended: `done`, or what the policy ran out of or got wrong. `reward` None: the environment
    leaves the verdict to the reward functions.
    """

    outcome: str
    reward: float | None = None
    tool_calls: int = 0
    malformed_calls: int = 0


class Rollout(msgspec.Struct):
    """One sampled trajectory, token in, token out.

    `response_ids` holds every sampled token, the EOS and the token that completed a stop string
    included; `text` is decoded once and cut at the stop. `logprobs` belong to the *sampling*
    distribution (temperature and truncation included), 0.0 on tokens the policy did not sample.
    `loss_mask` is 1 on the policy's own tokens, 0 on tool or environment tokens, which carry the weight version of the
    policy's token before them. Of several turns `text` is the last one; `episode` is set where an environment was.
    `greedy` marks the answer that the samples of its group are compared with (ReMax): scored and journaled with them,
    never trained on, last in its group.
    """

    group_id: GroupId
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    text: str
    logprobs: list[float]
    loss_mask: list[int]
    weight_versions: list[VersionRun]
    finish_reason: FinishReason
    turns: int = 1
    timing: dict[str, float] = {}
    failure: Failure | None = None
    episode: Episode | None = None
    greedy: bool = False

    @property
    def min_version(self) -> int | None:
        """Oldest weight version among the sampled tokens; None when no token was sampled."""
        return min((run.version for run in self.weight_versions), default=None)


class Score(msgspec.Struct):
    """A verdict on one rollout. `reward` None means unscored: left out of advantage and loss, and counted.

    `parts` maps the name of a reward function to its *unweighted* value, or None where it abstained.
    """

    reward: float | None
    parts: dict[str, float | None] = {}
    failure: Failure | None = None
    info: dict[str, Any] = {}


class GroupState(StrEnum):
    ADMITTED = "admitted"
    GENERATED = "generated"
    SCORED = "scored"
    READY = "ready"
    ASSIGNED = "assigned"
    TRAINED = "trained"
    DROPPED = "dropped"


class Group(msgspec.Struct):
    """The unit of work, of grouping for advantages, of journaling and of randomness."""

    group_id: GroupId
    prompt: Prompt
    rollouts: list[Rollout] = []
    scores: list[Score] = []
    state: GroupState = GroupState.ADMITTED
    admit_index: int = -1  # position in admission order; the buffer sets it

    @property
    def samples(self) -> list[Rollout]:
        """The rollouts that are trained on: all but a greedy answer."""
        return [r for r in self.rollouts if not r.greedy]

    @property
    def sample_scores(self) -> list[Score]:
        greedy = {i for i, r in enumerate(self.rollouts) if r.greedy}
        return [s for i, s in enumerate(self.scores) if i not in greedy]

    @property
    def min_version(self) -> int | None:
        """Oldest weight version in the group: what its staleness is counted from."""
        versions = [v for r in self.rollouts if (v := r.min_version) is not None]
        return min(versions, default=None)


class Experience(msgspec.Struct):
    """One trainable sample. Per-token lists align with `response_ids`.

    `reward` None: unscored, excluded from advantage and loss. `advantage` is the sequence's (mean
    over its loss tokens), `advantages` the per-token one that is trained on. `weight_version` is the
    oldest version among the tokens; `weight_versions` the whole run-length code. `baseline` is the reward of the
    group's greedy answer, where the advantage asks for one.
    """

    group_id: GroupId
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    loss_mask: list[int]
    reward: float | None
    weight_version: int
    weight_versions: list[VersionRun] = []
    advantage: float = 0.0
    advantages: list[float] | None = None
    truncated: bool = False  # the response was cut by max_tokens or the context
    baseline: float | None = None
    proximal_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    full_kl: list[float] | None = None  # per token, of the whole distributions
    values: list[float] | None = None
    bootstrap_value: float = 0.0  # the critic's value after the last token of a truncated response
    returns: list[float] | None = None  # per token, what the critic is trained towards
    metadata: dict[str, Any] = {}


class ExperienceBatch(msgspec.Struct):
    """All samples of one controller step, in the order in which they are trained."""

    step: int
    version: int  # the weight version that will be updated
    experiences: list[Experience]
    metrics: dict[str, float] = {}
    kl_coef: float | None = None  # where an adaptive KL coefficient stands; None: it is fixed


class WeightRef(msgspec.Struct, frozen=True):
    """Where a published weight version can be read: a folder, or a handle in this process's memory."""

    version: int
    location: str  # "memory:<key>" or a folder
    digest: str  # sha256 over names, shapes, dtypes and bytes


class Health(msgspec.Struct):
    """Truthy when the worker can serve."""

    ok: bool
    version: int = -1
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0  # share of KV pages in use, 0..1
    memory_bytes: int = 0
    message: str = ""

    def __bool__(self) -> bool:
        return self.ok


class TrainMetrics(msgspec.Struct):
    """What one `update` reports: the field's names to floats, e.g. `actor/loss`, `actor/grad_norm`."""

    values: dict[str, float]
    optimizer_steps: int = 0


class StepMetrics(msgspec.Struct):
    """What one controller step reports, under the field's names (`reward/mean`, `kl/ref` ...)."""

    step: int
    version: int
    values: dict[str, float]


class BufferStats(msgspec.Struct):
    """Counts of groups by state. `admitted` counts every group assigned, trained, ready or in flight."""

    admitted: int
    in_flight: int
    ready: int
    assigned: int
    trained: int
    dropped: dict[str, int] = {}


class StepAssignment(msgspec.Struct):
    """A step whose groups were ASSIGNED before the process ended: to be redone in this order."""

    step: int
    groups: list[Group]
    dropped: dict[str, int] = {}  # reason -> groups dropped while the step was gathered


class BufferState(msgspec.Struct):
    """What a journal knows after a restart."""

    redo: list[StepAssignment] = []  # ASSIGNED or TRAINED steps after the newest whole checkpoint
    pending: list[Group] = []  # admitted, not assigned; finished parts of them included
    drawn: int = 0  # prompts drawn from the data so far (first attempts)
    dropped: dict[str, int] = {}  # reason -> groups dropped since the last assigned step was taken


class Span(msgspec.Struct, frozen=True):
    """One bar of the time line: clock seconds, `lane` is where it ran (rollout, reward, train, controller)."""

    lane: str
    name: str
    start: float
    end: float
    args: dict[str, Any] = {}


class MetricSink(Protocol):
    """Anywhere metrics go: a file, TensorBoard, a terminal."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def run_length(versions: Iterable[int]) -> list[VersionRun]:
    """Run-length encode per-token weight versions."""
    runs: list[VersionRun] = []
    for v in versions:
        if runs and runs[-1].version == v:
            runs[-1] = VersionRun(v, runs[-1].length + 1)
        else:
            runs.append(VersionRun(v, 1))
    return runs


def expand_versions(runs: Iterable[VersionRun]) -> list[int]:
    """Inverse of `run_length`."""
    return [run.version for run in runs for _ in range(run.length)]

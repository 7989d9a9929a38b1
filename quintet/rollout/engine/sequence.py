"""One sample being generated, and everything that decides when it ends and what it becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quintet.rollout.engine.sampling import sequence_key
from quintet.types import (
    Failure,
    FailureKind,
    FinishReason,
    Group,
    GroupId,
    QuintetError,
    Rollout,
    SampledToken,
    SamplingParams,
    expand_versions,
    run_length,
)

OnToken = Callable[[SampledToken], None]
Decode = Callable[[list[int]], str]
Finished = tuple[int, Rollout]  # request number, rollout


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one sample. `pages` and `num_cached` belong to the engine that has a KV cache of its own."""

    request: int
    arrival: int  # age: smaller is older
    group_id: GroupId
    sample_index: int
    prompt_ids: list[int]
    params: SamplingParams
    key: int
    max_new: int  # max_tokens, or what the context leaves of it
    stop_ids: frozenset[int]
    queued_at: float
    on_token: OnToken | None = None  # told of each token as it is sampled, in the engine's thread
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    started_at: float | None = None
    first_token_at: float | None = None
    stop_at: int | None = None  # where the text is cut, in characters, by a stop string
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens_from(self, start: int) -> list[int]:
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.output_ids[start - prompt :]
        return self.prompt_ids[start:] + self.output_ids

    def append(self, token: int, logprob: float, version: int, now: float, decode: Decode) -> FinishReason | None:
        """Take a sampled token; the reason if it was the last one."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.tell(token, logprob, version)
        if token in self.stop_ids:
            return FinishReason.STOP
        if self.params.stop and self.stop_string_ends_here(decode):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output_ids) >= self.max_new else None

    def take_over(self, rollout: Rollout, now: float) -> None:
        """The tokens that another engine has sampled for it; the time until now counts as theirs."""
        self.output_ids, self.logprobs = list(rollout.response_ids), list(rollout.logprobs)
        self.versions = expand_versions(rollout.weight_versions)
        self.first_token_at, self.started_at = now, now - rollout.timing.get("prefill_s", 0.0)
        self.queued_at = self.started_at - rollout.timing.get("queue_s", 0.0)
        for token, logprob, version in zip(self.output_ids, self.logprobs, self.versions, strict=True):
            self.tell(token, logprob, version)

    def tell(self, token: int, logprob: float, version: int) -> None:
        if self.on_token is not None:
            self.on_token(SampledToken(self.sample_index, token, logprob, version))

    def stop_string_ends_here(self, decode: Decode) -> bool:
        # A token that shows adds at least one byte and a character has at most four, so a stop string that ends with
        # this token began within the window; the window's own first characters may decode differently, hence the 8.
        window = 4 * max(map(len, self.params.stop)) + 8
        tail = decode(self.output_ids[-window:])
        if not any(stop in tail for stop in self.params.stop):
            return False
        text = decode(self.output_ids)
        places = [at for stop in self.params.stop if (at := text.find(stop)) >= 0]
        self.stop_at = min(places, default=None)
        return bool(places)

    def rollout(self, reason: FinishReason, now: float, decode: Decode, failure: Failure | None = None) -> Rollout:
        """What the sample became. The text ends before the stop string or the stop token; a failed sample has none,
        because decoding may be what failed."""
        shown = self.output_ids
        if shown and shown[-1] in self.stop_ids:
            shown = shown[:-1]
        started = self.started_at if self.started_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        return Rollout(
            group_id=self.group_id,
            sample_index=self.sample_index,
            prompt_ids=self.prompt_ids,
            response_ids=self.output_ids,
            text="" if failure else decode(shown)[: self.stop_at],
            logprobs=self.logprobs,
            loss_mask=[1] * len(self.output_ids),
            weight_versions=run_length(self.versions),
            finish_reason=reason,
            timing={"queue_s": started - self.queued_at, "prefill_s": first - started, "decode_s": now - first},
            failure=failure,
        )


@dataclass
class Intake:
    """Turns groups into sequences, or into failed rollouts where a prompt cannot be served.

    `context` is the longest sequence in tokens that the model can hold; None: it sets no limit.
    """

    eos_ids: frozenset[int]
    vocab_size: int
    context: int | None
    next_request: int = 0
    next_arrival: int = 0

    def take_request(self) -> int:
        self.next_request += 1
        return self.next_request

    def refusal(self, prompt_ids: list[int]) -> str | None:
        """Why this prompt cannot be served, if so."""
        if not prompt_ids:
            return "the prompt has no tokens"
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            return f"the prompt has token ids outside the model's vocabulary of {self.vocab_size}"
        if self.context is not None and len(prompt_ids) >= self.context:
            return f"a prompt of {len(prompt_ids)} tokens leaves no room in the model's context of {self.context}"
        return None

    def sequences(
        self, request: int, group: Group, params: SamplingParams, now: float, on_token: OnToken | None = None
    ) -> list[Sequence]:
        prompt_ids = list(group.prompt.token_ids)
        room = params.max_tokens if self.context is None else self.context - len(prompt_ids)
        made = [
            Sequence(
                request=request,
                arrival=self.next_arrival + index,
                group_id=group.group_id,
                sample_index=params.first_sample + index,
                prompt_ids=prompt_ids,
                params=params,
                key=sequence_key(params.seed, group.group_id, params.first_sample + index),
                max_new=min(params.max_tokens, room),
                stop_ids=self.eos_ids | frozenset(params.stop_token_ids),
                queued_at=now,
                on_token=on_token,
            )
            for index in range(params.n)
        ]
        self.next_arrival += params.n
        return made


def check_params(params: SamplingParams) -> None:
    """Raises QuintetError for settings that no engine can sample with."""
    wrong = [
        (params.n < 1, f"n={params.n} must be at least 1"),
        (params.max_tokens < 1, f"max_tokens={params.max_tokens} must be at least 1"),
        (not params.temperature >= 0.0, f"temperature={params.temperature} must not be negative"),
        (not 0.0 < params.top_p <= 1.0, f"top_p={params.top_p} must be above 0 and at most 1"),
        (not 0.0 <= params.min_p <= 1.0, f"min_p={params.min_p} must be at least 0 and at most 1"),
        (min(params.first_sample, params.first_position) < 0, "first_sample and first_position must not be negative"),
        (params.top_k < 0, f"top_k={params.top_k} must not be negative (0: no limit)"),
        ("" in params.stop, "an empty stop string would end every sample before its first token"),
    ]
    for is_wrong, message in wrong:
        if is_wrong:
            raise QuintetError(f"Sampling parameters: {message}.")


def engine_failure(message: str, *, retryable: bool = False) -> Failure:
    return Failure(FailureKind.ENGINE, message, retryable)

"""Generation: prompts in, sampled tokens with their log-probabilities and weight version out.

Stands for: an inference engine such as vLLM or SGLang. Grown-up version: quintet/rollout/engine/.

A decode step produces one token for every running request and costs `STEP_S`, however many run: generation is
bound by memory traffic. Static batching keeps a batch until its longest member ends; continuous batching gives a
free slot to the next request at once. Randomness is keyed by (seed, group, sample), never by batch position, so
both sample exactly the same tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .clock import Clock, FakeClock
from .model import EOS, Table, TinyPolicy

STEP_S = 0.01  # one decode step of the whole batch

Tool = Callable[[Sequence[int], Sequence[int]], Sequence[int]]  # (prompt, response so far) → tokens of the environment


class StaleRolloutError(RuntimeError):
    """Weights of one version were expected, and a rollout (or a worker) of another came."""


@dataclass
class Rollout:
    """One sampled response. Token in, token out: `logprobs` are those of the policy that sampled."""

    group_id: int
    sample_index: int
    prompt: tuple[int, ...]
    weight_version: int
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)  # 1: sampled by the policy, 0: put there by a tool
    finish_reason: str = ""  # "stop" or "length"


@dataclass(eq=False)
class Request:
    rollout: Rollout
    rng: random.Random

    @property
    def n_tokens(self) -> int:
        return len(self.rollout.prompt) + len(self.rollout.response)


class KVCache(Protocol):
    """Room for the keys and values of requests; the paged one lives in paging.py."""

    def admit(self, request: Request) -> bool: ...
    def append(self, request: Request) -> bool: ...
    def release(self, request: Request) -> None: ...


class UnlimitedKV:
    def admit(self, request: Request) -> bool:
        return True

    def append(self, request: Request) -> bool:
        return True

    def release(self, request: Request) -> None:
        return None


@dataclass
class RolloutWorker:
    """Holds its own copy of the weights: what the trainer does is seen only after `update_weights`."""

    policy: TinyPolicy
    clock: Clock = field(default_factory=FakeClock)
    seed: int = 0
    group_size: int = 4
    max_tokens: int = 12
    slots: int = 64
    continuous: bool = True
    kv: KVCache = field(default_factory=UnlimitedKV)
    tool: Tool | None = None
    version: int = 0
    preemptions: int = 0
    _groups: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if min(self.group_size, self.max_tokens, self.slots) < 1:
            raise ValueError("group_size, max_tokens and slots must be at least 1")
        self.policy = self.policy.clone()

    def generate(self, prompts: Sequence[Sequence[int]], weight_version: int | None = None) -> list[Rollout]:
        """`group_size` samples of every prompt, in order. A `weight_version` other than the loaded one raises."""
        if weight_version not in (None, self.version):
            raise StaleRolloutError(f"the worker holds version {self.version}, version {weight_version} was asked for")
        policy, requests = self.policy, self._requests(prompts)  # new weights may arrive while these are decoded
        waiting, running = deque(requests), list[Request]()
        with self.clock.span("rollout", f"generate v{self.version}"):
            while waiting or running:
                self._admit(waiting, running)
                self.clock.sleep(STEP_S)
                self._decode(policy, waiting, running)
        return [request.rollout for request in requests]

    def update_weights(self, weights: Table, version: int) -> None:
        self.policy, self.version = TinyPolicy(weights), version

    def health_check(self) -> dict[str, int | bool]:
        return {"ok": True, "version": self.version, "slots": self.slots}

    def evaluator(self, policy: TinyPolicy, seed: int, samples: int) -> RolloutWorker:
        """A second worker to measure `policy` with: its own random numbers, its own clock."""
        tokens, tool = self.max_tokens, self.tool
        return RolloutWorker(policy, FakeClock(), seed, group_size=samples, max_tokens=tokens, tool=tool)

    def _requests(self, prompts: Sequence[Sequence[int]]) -> list[Request]:
        requests = []
        for prompt in prompts:
            if not prompt or not all(0 <= token < self.policy.vocab_size for token in prompt):
                raise ValueError(f"prompt {list(prompt)} is empty or holds a token outside the vocabulary")
            for i in range(self.group_size):
                rollout = Rollout(self._groups, i, tuple(prompt), self.version)
                requests.append(Request(rollout, random.Random(f"{self.seed}/{self._groups}/{i}")))
            self._groups += 1
        return requests

    def _admit(self, waiting: deque[Request], running: list[Request]) -> None:
        if running and not self.continuous:
            return  # static: the next batch starts when the last request of this one has ended
        while waiting and len(running) < self.slots and self.kv.admit(waiting[0]):
            running.append(waiting.popleft())
        if not running:
            raise RuntimeError("the KV cache is too small for a single request")

    def _decode(self, policy: TinyPolicy, waiting: deque[Request], running: list[Request]) -> None:
        ready = [r for r in list(running) if r in running and self._make_room(r, waiting, running)]
        for request in ready:  # one forward pass: all of them need their room at the same time
            self._sample(policy, request)
        for request in ready:
            if request.rollout.finish_reason:
                running.remove(request)
                self.kv.release(request)

    def _make_room(self, request: Request, waiting: deque[Request], running: list[Request]) -> bool:
        """Room for one more token; the request admitted last gives way (its blocks go, its tokens stay)."""
        while not self.kv.append(request):
            victim = running.pop()
            self.kv.release(victim)
            waiting.appendleft(victim)
            self.preemptions += 1
            if victim is request:
                return False
        return True

    def _sample(self, policy: TinyPolicy, request: Request) -> None:
        rollout = request.rollout
        prev = rollout.response[-1] if rollout.response else rollout.prompt[-1]
        token, logprob = policy.sample(prev, request.rng)
        rollout.response.append(token)
        rollout.logprobs.append(logprob)
        rollout.loss_mask.append(1)
        if self.tool is not None:
            told = self.tool(rollout.prompt, rollout.response)
            rollout.response += told
            rollout.logprobs += [0.0] * len(told)
            rollout.loss_mask += [0] * len(told)
        if token == EOS:
            rollout.finish_reason = "stop"
        elif len(rollout.response) >= self.max_tokens:
            rollout.finish_reason = "length"

"""Generation and training at the same time: a producer thread, a bounded queue, a consumer, and what staleness costs.

Stands for: asynchronous RL (AReaL, arXiv:2505.24298, and others). Grown-up version: the producer task in
quintet/controller/controller.py, the corrections in quintet/algorithms/*.

One formula for both modes: batch i may start while i < version + 1 + η. With η = 0 that is the synchronous loop.
A batch that was sampled η versions ago comes from another policy μ than the π_prox it trains; the weight
min(π_prox/μ, cap) per token corrects that (truncated importance sampling), within the variance the cap allows.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial

from .buffer import Experience
from .controller import Controller
from .model import TinyPolicy
from .rollout import Rollout


def train_async(controller: Controller, steps: int, queue_size: int = 1) -> None:
    """Trains `steps` steps while a second thread generates; staleness stays within `controller.max_staleness`."""
    if queue_size < 1:
        raise ValueError(f"queue_size must be at least 1, got {queue_size}")
    clock, first = controller.worker.clock, controller.version
    queue: deque[list[Rollout]] = deque()

    def may_start(i: int) -> bool:
        return i < controller.version + 1 + controller.max_staleness and len(queue) < queue_size

    def produce() -> None:
        for i in range(first, first + steps):
            clock.wait_until(partial(may_start, i))
            queue.append(controller.worker.generate(controller.sample_prompts(i)))

    producer = clock.spawn("rollout", produce)
    for _ in range(steps):
        clock.wait_until(lambda: bool(queue) or producer.done)
        if not queue:
            break  # the producer failed: join raises its error
        controller.learn(queue.popleft())
    clock.join(producer)


def recompute_old(policy: TinyPolicy, batch: list[Experience]) -> None:
    """Without correction: the ratio starts at 1, as if the policy being trained had sampled the batch."""
    for e in batch:
        e.proximal_logprobs = policy.token_logprobs(e.prompt_ids, e.response_ids)


def truncated_importance(policy: TinyPolicy, batch: list[Experience], cap: float = 2.0) -> None:
    """With correction: besides, each token weighs min(π_prox/μ, cap)."""
    recompute_old(policy, batch)
    for e in batch:
        pairs = zip(e.proximal_logprobs or [], e.logprobs, strict=True)
        e.importance = [min(cap, math.exp(min(20.0, new - sampled))) for new, sampled in pairs]

"""Which sequences run in the next step.

A sequence is WAITING (no pages) or RUNNING (its KV is cached up to `num_cached`). Edges: admitted WAITING -> RUNNING;
preempted RUNNING -> WAITING, at the front, its tokens kept and its KV recomputed later; finished RUNNING or WAITING ->
gone. A step is either a prefill of newly admitted sequences or one decoding step of all running ones; waiting
sequences go first. When pages run out, the youngest running sequence is preempted, so that the oldest always ends.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quintet.rollout.engine.attention import Segment
from quintet.rollout.engine.kv_cache import KVCache
from quintet.rollout.engine.sequence import Sequence


@dataclass
class Work:
    """One sequence's part of a step: its tokens from `start` on, and who else samples from the same logits."""

    sequence: Sequence
    start: int
    followers: list[Sequence] = field(default_factory=list)

    @property
    def samplers(self) -> list[Sequence]:
        return [self.sequence, *self.followers]

    @property
    def segment(self) -> Segment:
        return Segment(self.sequence.tokens_from(self.start), self.start, self.sequence.pages)


class Scheduler:
    """Continuous admission up to `max_running` sequences and `prefill_tokens` prompt tokens a step."""

    def __init__(self, cache: KVCache, *, max_running: int, prefill_tokens: int) -> None:
        self._cache = cache
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.phase = "decode"  # of the work scheduled last: "prefill" or "decode"
        self.preemptions = 0
        self.prompt_tokens = 0  # prompt tokens of all admissions
        self.computed_prompt_tokens = 0  # ... and how many of them were not shared

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    def schedule(self, now: float) -> list[Work]:
        """Work of the next step; empty when nothing waits or runs. KV pages for it are allocated."""
        admitted = self._admit(now)
        self.phase = "prefill" if admitted else "decode"
        return admitted or self._decode()

    def finish(self, sequence: Sequence) -> None:
        """Drop a running sequence and its references to pages."""
        self._cache.pool.release(sequence.pages)
        sequence.pages = []
        self.running.remove(sequence)

    def take_matching(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove and return the sequences for which `wanted` holds, oldest first."""
        taken = [s for s in self.running if wanted(s)]
        for sequence in taken:
            self.finish(sequence)
        taken += [s for s in self.waiting if wanted(s)]
        self.waiting = deque(s for s in self.waiting if not wanted(s))
        return sorted(taken, key=lambda s: s.arrival)

    def clear(self) -> list[Sequence]:
        """Remove and return all sequences without giving pages back: for use with `KVCache.reset`."""
        taken = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        for sequence in taken:
            sequence.pages = []
        return taken

    def preempt_all(self) -> None:
        """Every running sequence waits again and recomputes its KV, e.g. because the weights changed."""
        while self.running:
            self._preempt(self.running[-1])

    def _admit(self, now: float) -> list[Work]:
        batch: list[Work] = []
        budget = self._prefill_tokens
        while self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            leader = self._leader(batch, sequence)
            if leader is not None:
                self._follow(leader, sequence)
            else:
                source, shared = self._shareable(batch, sequence)
                cost = sequence.length - shared
                if (batch and cost > budget) or not self._fits(source, shared, sequence):
                    break
                budget -= cost
                batch.append(self._start(source, shared, sequence))
            self.waiting.popleft()
            insort(self.running, sequence, key=lambda s: s.arrival)
            sequence.started_at = now if sequence.started_at is None else sequence.started_at
        return batch

    def _leader(self, batch: list[Work], sequence: Sequence) -> Work | None:
        """Work of this step whose logits are also the first ones of `sequence`."""
        if sequence.output_ids:
            return None
        return next((w for w in batch if w.sequence.request == sequence.request and not w.sequence.output_ids), None)

    def _follow(self, leader: Work, sequence: Sequence) -> None:
        leader.followers.append(sequence)
        sequence.pages = self._cache.pool.share(leader.sequence.pages)
        sequence.num_cached = len(sequence.prompt_ids)
        self.prompt_tokens += len(sequence.prompt_ids)

    def _shareable(self, batch: list[Work], sequence: Sequence) -> tuple[Sequence | None, int]:
        """A running sample of the same prompt and how many cached tokens of it may be taken over.

        A prompt that is being computed in this very step is shared by whole pages only: its last, partial page will
        be written to in this step and could not be copied before.
        """
        kin = next((s for s in self.running if s.request == sequence.request), None)
        if kin is None:
            return None, 0
        prompt = len(sequence.prompt_ids)
        if any(work.sequence is kin or kin in work.followers for work in batch):
            prompt -= prompt % self._cache.page_size
        return kin, min(prompt, sequence.length - 1)

    def _fits(self, source: Sequence | None, shared: int, sequence: Sequence) -> bool:
        # One page in reserve for the token to come, so that an admission does not preempt itself at once.
        table = source.pages[: self._cache.pages_for(shared)] if source else []
        copied = 1 if shared % self._cache.page_size else 0
        need = self._cache.pages_for(sequence.length) - len(table) + copied
        return need + (1 if self.running else 0) <= self._cache.pool.free

    def _start(self, source: Sequence | None, shared: int, sequence: Sequence) -> Work:
        if source is not None:
            sequence.pages = self._cache.pool.share(source.pages[: self._cache.pages_for(shared)])
        self._cache.make_writable(sequence.pages, shared, sequence.length)
        sequence.num_cached = sequence.length
        self.prompt_tokens += len(sequence.prompt_ids)
        self.computed_prompt_tokens += max(0, len(sequence.prompt_ids) - shared)
        return Work(sequence, shared)

    def _decode(self) -> list[Work]:
        batch: list[Work] = []
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            start = sequence.num_cached
            while self._cache.missing(sequence.pages, start, sequence.length) > self._cache.pool.free:
                self._preempt(self.running[-1])
                if index >= len(self.running):
                    return batch
            self._cache.make_writable(sequence.pages, start, sequence.length)
            sequence.num_cached = sequence.length
            batch.append(Work(sequence, start))
            index += 1
        return batch

    def _preempt(self, sequence: Sequence) -> None:
        self._cache.pool.release(sequence.pages)
        sequence.pages = []
        sequence.num_cached = 0
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

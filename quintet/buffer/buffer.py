"""The experience buffer: each group walks a small state machine, and every edge is journaled.

    ADMITTED -> GENERATED -> SCORED -> READY -> ASSIGNED(step, position) -> TRAINED
    any state before ASSIGNED -> DROPPED(reason)

No other edge exists. In particular nothing leaves ASSIGNED except to TRAINED: a batch whose membership
is durable is trained exactly once, after a crash too (it is redone from the journal, which adds no edge
that is there already). Nothing returns to READY: a group that was dropped comes back as its next attempt.

Groups are taken in the order of admission, so that a long one is never overtaken into staleness.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from quintet.buffer.journal import Journal
from quintet.types import BufferState, BufferStats, Group, GroupId, GroupState, StepAssignment

_EDGES: dict[GroupState, GroupState] = {
    GroupState.ADMITTED: GroupState.GENERATED,
    GroupState.GENERATED: GroupState.SCORED,
    GroupState.SCORED: GroupState.READY,
}
_IN_FLIGHT = (GroupState.ADMITTED, GroupState.GENERATED, GroupState.SCORED)


class IllegalEdge(RuntimeError):
    """A bug in the caller: the state machine has no such edge."""


class JournaledBuffer:
    """The in-process buffer. `on_drop(group, reason)` tells the owner of a drop that `take` decided itself."""

    def __init__(
        self,
        journal: Journal,
        *,
        max_staleness: int,
        resume_from: int = 0,
        on_drop: Callable[[Group, str], None] | None = None,
    ) -> None:
        self._journal = journal
        self._max_staleness = max_staleness
        self._resume_from = resume_from
        self._on_drop = on_drop
        self._live: dict[GroupId, Group] = {}  # every group before TRAINED or DROPPED, by admission
        self._assigned: dict[int, list[Group]] = {}
        self._dropped: Counter[str] = Counter()
        self._trained = 0
        self._next_index = 0
        self._next_step = resume_from + 1
        self._changed = asyncio.Condition()

    async def admit(self, groups: list[Group]) -> None:
        """Give the groups their place in the order and journal them. Raises IllegalEdge on an id seen before."""
        for group in groups:
            if group.group_id in self._live or group.state is not GroupState.ADMITTED:
                raise IllegalEdge(f"group {group.group_id} ({group.state}) cannot be admitted")
            group.admit_index = self._next_index
            self._next_index += 1
            self._live[group.group_id] = group
            self._journal.edge(group, GroupState.ADMITTED)
        await self._notify()

    async def advance(self, group: Group, state: GroupState) -> None:
        """Along one of the three edges up to READY. Raises IllegalEdge on any other."""
        if self._live.get(group.group_id) is not group or _EDGES.get(group.state) is not state:
            raise IllegalEdge(f"group {group.group_id}: no edge {group.state} -> {state}")
        self._journal.edge(group, state)
        group.state = state
        await self._notify()

    async def take(self, n_groups: int, current_version: int) -> list[Group]:
        """Wait until the `n_groups` oldest live groups are READY, assign them to the next step durably, return them.

        A READY group with staleness (current version - its oldest token's version) above the bound is
        dropped and reported to `on_drop`, whose owner admits its next attempt.
        """
        while True:
            await self._drop_stale(current_version)
            batch = self._oldest(n_groups)
            if batch is not None:
                break
            async with self._changed:
                await self._changed.wait()
        self._journal.assign(batch, self._next_step)
        for group in batch:
            group.state = GroupState.ASSIGNED
            del self._live[group.group_id]
        self._assigned[self._next_step] = batch
        self._next_step += 1
        return batch

    async def commit(self, step: int, version: int) -> None:
        """The step's groups are part of weight version `version`. A redone step adds no second edge."""
        groups = self._assigned.pop(step)
        self._journal.trained([g for g in groups if g.state is GroupState.ASSIGNED], step)
        for group in groups:
            group.state = GroupState.TRAINED
        self._trained += len(groups)

    async def drop(self, group: Group, reason: str) -> None:
        """From any state before ASSIGNED. The group gives its place in the admission count back."""
        if self._live.get(group.group_id) is not group:
            raise IllegalEdge(f"group {group.group_id} ({group.state}) cannot be dropped")
        self._journal.edge(group, GroupState.DROPPED, step=self._next_step, reason=reason)
        group.state = GroupState.DROPPED
        del self._live[group.group_id]
        self._dropped[reason] += 1
        await self._notify()

    async def resume(self) -> BufferState:
        """Rebuild from the journal: the steps to redo, and the groups in flight with what they had finished."""
        counts = self._journal.counts()
        self._next_index = counts.get("next_admit_index", 0)
        self._next_step = max(counts.get("last_step", 0), self._resume_from) + 1
        self._dropped = Counter({k.removeprefix("dropped:"): n for k, n in counts.items() if k.startswith("dropped:")})
        pending: list[Group] = []
        for group, step in self._journal.load(self._resume_from):
            if step is None:
                self._live[group.group_id] = group
                pending.append(group)
            else:
                self._assigned.setdefault(step, []).append(group)
        redone = sum(len(groups) for groups in self._assigned.values())
        self._trained = counts.get("assigned", 0) + counts.get("trained", 0) + counts.get("lost", 0) - redone
        dropped = self._journal.dropped(self._resume_from)
        redo = [StepAssignment(s, groups, dropped.get(s, {})) for s, groups in sorted(self._assigned.items())]
        pending += await self._admit_unanswered()
        return BufferState(redo, pending, counts.get("drawn", 0), dropped.get(self._next_step, {}))

    async def _admit_unanswered(self) -> list[Group]:
        """The next attempts that dropped groups were to come back as when the process ended."""
        groups = [Group(group_id=g.group_id.next_attempt(), prompt=g.prompt) for g in self._journal.unanswered()]
        await self.admit(groups)
        return groups

    def stats(self) -> BufferStats:
        ready = sum(g.state is GroupState.READY for g in self._live.values())
        assigned = sum(len(groups) for groups in self._assigned.values())
        return BufferStats(
            admitted=len(self._live) + assigned + self._trained,
            in_flight=len(self._live) - ready,
            ready=ready,
            assigned=assigned,
            trained=self._trained,
            dropped=dict(self._dropped),
        )

    def _oldest(self, n_groups: int) -> list[Group] | None:
        """The `n_groups` first admitted live groups, once all of them are READY."""
        oldest = sorted(self._live.values(), key=lambda g: g.admit_index)[:n_groups]
        if len(oldest) < n_groups or any(g.state in _IN_FLIGHT for g in oldest):
            return None
        return oldest

    async def _drop_stale(self, current_version: int) -> None:
        for group in list(self._live.values()):
            oldest = group.min_version
            if group.state is not GroupState.READY or oldest is None:
                continue
            if current_version - oldest > self._max_staleness:
                await self.drop(group, "stale")
                if self._on_drop is not None:
                    self._on_drop(group, "stale")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

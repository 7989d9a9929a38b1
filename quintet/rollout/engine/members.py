"""Who takes part in a step of the fast engine, and the step's arrays made from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quintet.rollout.engine.prefix_cache import Node
from quintet.rollout.engine.slots import Slots, State
from quintet.rollout.engine.step import Step


@dataclass(eq=False)
class Prompt:
    """The prompt of one request: `chain` is what is known of it, `pages` are private until all of it is computed."""

    number: int
    request: int
    ids: np.ndarray
    chain: list[Node]
    pages: list[int]
    known: int  # tokens that the chain held at first
    computed: int = 0  # tokens computed into the private pages
    slots: set[int] = field(default_factory=set)

    @property
    def ready(self) -> bool:
        return self.known + self.computed == len(self.ids)


@dataclass(frozen=True)
class Extra:
    """A member of a step that is not plain decoding: `ids` from `position` on; `slot` None: they are the prompt's."""

    prompt: Prompt
    slot: int | None
    ids: np.ndarray
    position: int
    row: np.ndarray  # its own pages
    own_before: int
    writes: bool
    samplers: list[int]  # slots that sample from its last logits


@dataclass(frozen=True)
class Decoding:
    """The decoding slots, samples of one prompt side by side; holds until a sample begins or ends."""

    slots: np.ndarray
    group_start: np.ndarray
    shared_start: np.ndarray
    shared_ids: np.ndarray
    shared_counts: np.ndarray

    @classmethod
    def empty(cls) -> Decoding:
        return cls(np.zeros(0, dtype=np.int64), *(_ints([0]), _ints([0]), _ints([]), _ints([])))

    @classmethod
    def of(cls, slots: Slots, prompts: Mapping[int, Prompt]) -> Decoding:
        found = slots.within(State.DECODE)
        found = found[np.argsort(slots.prefix[found], kind="stable")]
        numbers, first = np.unique(slots.prefix[found], return_index=True)
        chains = [prompts[number].chain for number in numbers.tolist()]
        return cls(found, _ints([*first, len(found)]), *_shared(chains))


def decoding_step(decoding: Decoding, slots: Slots) -> Step:
    """Every decoding sample's last token, from which its next one is sampled."""
    members = np.arange(len(decoding.slots), dtype=np.int32)
    ones, cached = np.ones_like(members), slots.cached[decoding.slots]
    return Step(
        ids=slots.last[decoding.slots],
        member_start=members,
        member_count=ones,
        member_position=slots.prompt[decoding.slots] + cached,
        member_row=decoding.slots.astype(np.int32),
        own_before=cached,
        member_writes=ones,
        own_table=slots.table,
        group_start=decoding.group_start,
        shared_start=decoding.shared_start,
        shared_ids=decoding.shared_ids,
        shared_counts=decoding.shared_counts,
        logit_token=members,
        sampler_logit=members,
        draws=slots.draws(decoding.slots),
    )


def extra_step(extras: Sequence[Extra], slots: Slots, *, every_logit: bool = False) -> Step:
    """Each extra as a group of its own; logits of the last token of those that have samplers, or of every token."""
    counts = _ints([len(extra.ids) for extra in extras])
    starts = np.cumsum(counts, dtype=np.int32) - counts
    table = np.zeros((len(extras), max(slots.table.shape[1], *(len(e.row) for e in extras))), dtype=np.int32)
    for row, extra in zip(table, extras, strict=True):
        row[: len(extra.row)] = extra.row
    sampling = [index for index, extra in enumerate(extras) if extra.samplers]
    samplers = [extras[index].samplers for index in sampling]
    shared_start, shared_ids, shared_counts = _shared([extra.prompt.chain for extra in extras])
    ids = np.concatenate([extra.ids for extra in extras])
    return Step(
        ids=ids,
        member_start=starts,
        member_count=counts,
        member_position=_ints([extra.position for extra in extras]),
        member_row=np.arange(len(extras), dtype=np.int32),
        own_before=_ints([extra.own_before for extra in extras]),
        member_writes=_ints([extra.writes for extra in extras]),
        own_table=table,
        group_start=np.arange(len(extras) + 1, dtype=np.int32),
        shared_start=shared_start,
        shared_ids=shared_ids,
        shared_counts=shared_counts,
        logit_token=np.arange(len(ids), dtype=np.int32) if every_logit else (starts + counts - 1)[sampling],
        sampler_logit=np.repeat(np.arange(len(sampling), dtype=np.int32), [len(who) for who in samplers]),
        draws=slots.draws(np.array([slot for who in samplers for slot in who], dtype=np.int64)),
    )


def _shared(chains: Sequence[Sequence[Node]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start of each chain, then pages and their tokens, one chain after the other."""
    nodes = [node for chain in chains for node in chain]
    starts = np.cumsum([0, *(len(chain) for chain in chains)], dtype=np.int32)
    return starts, _ints([node.page for node in nodes]), _ints([node.count for node in nodes])


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)

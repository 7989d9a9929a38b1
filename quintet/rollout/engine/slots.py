"""What the running samples are, as arrays over slots, so that a decoding step costs no Python per sample."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from quintet.rollout.engine.sampling import keyed_uniform
from quintet.rollout.engine.sequence import Sequence
from quintet.rollout.engine.step import DRAW, PAGE


class State(IntEnum):
    """FREE -> PROMPT (its prompt is being computed) -> DECODE; or, where the prompt was there already, FREE -> START
    (the prompt's last logits are wanted) -> DECODE. A sample that had tokens goes through REFILL instead of START, or,
    with one token, which is what it goes on from, straight to DECODE. Any -> FREE. Edges that must not exist: DECODE
    back to any but FREE."""

    FREE = 0
    PROMPT = 1
    START = 2
    REFILL = 3
    DECODE = 4


class Slots:
    """`count` places. Arrays are indexed by slot; those of a FREE slot mean nothing."""

    def __init__(self, count: int, longest: int) -> None:
        self.sequences: list[Sequence | None] = [None] * count
        self.state = np.zeros(count, dtype=np.int8)
        self.prefix = np.zeros(count, dtype=np.int64)  # number of the prompt it continues
        self.prompt = np.zeros(count, dtype=np.int32)  # tokens of that prompt
        self.table = np.zeros((count, -(-longest // PAGE) + 1), dtype=np.int32)  # own pages
        self.pages = np.zeros(count, dtype=np.int32)  # how many of them
        self.cached = np.zeros(count, dtype=np.int32)  # own tokens whose KV is there
        self.length = np.zeros(count, dtype=np.int32)  # sampled tokens
        self.limit = np.zeros(count, dtype=np.int32)  # ... at most
        self.last = np.zeros(count, dtype=np.int32)  # the last of them
        self.arrival = np.zeros(count, dtype=np.int64)
        self.with_strings = np.zeros(count, dtype=bool)
        self.listened = np.zeros(count, dtype=bool)  # whether someone wants to be told of each token
        self._first = np.zeros(count, dtype=np.uint64)  # tokens that the response had before this request
        self._key = np.zeros(count, dtype=np.uint64)
        self._draw = np.zeros(count, dtype=DRAW)
        self._stops = np.full((count, 1), -1, dtype=np.int32)
        self._tokens = np.zeros((count, 64), dtype=np.int32)
        self._logprobs = np.zeros((count, 64), dtype=np.float32)
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> np.ndarray:
        """Slots in use, oldest sample first."""
        slots = np.flatnonzero(self.state)
        return slots[np.argsort(self.arrival[slots], kind="stable")]

    def within(self, state: State) -> np.ndarray:
        return np.flatnonzero(self.state == state)

    def sequence(self, slot: int) -> Sequence:
        found = self.sequences[slot]
        assert found is not None
        return found

    def put(self, sequence: Sequence, prefix: int, state: State) -> int:
        slot = self._free.pop()
        self.sequences[slot] = sequence
        self.state[slot], self.prefix[slot], self.prompt[slot] = state, prefix, len(sequence.prompt_ids)
        self.pages[slot], self.cached[slot] = 0, 0
        self.length[slot], self.limit[slot] = len(sequence.output_ids), sequence.max_new
        self.last[slot] = sequence.output_ids[-1] if sequence.output_ids else -1
        self.arrival[slot], self._key[slot] = sequence.arrival, sequence.key
        params = sequence.params
        self.with_strings[slot], self.listened[slot] = bool(params.stop), sequence.on_token is not None
        self._first[slot] = params.first_position
        self._draw[slot] = (params.temperature, params.top_k, params.top_p, params.min_p, 0.0)
        self._set_stops(slot, sorted(sequence.stop_ids))
        self._reserve(len(sequence.output_ids))
        return slot

    def draws(self, slots: np.ndarray) -> np.ndarray:
        """Settings and keyed randomness of the next token of each slot, [S] of DRAW."""
        draws = self._draw[slots]
        draws["uniform"] = keyed_uniform(self._key[slots], self._first[slots] + self.length[slots].astype(np.uint64))
        return draws

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Take one sampled token each (slots are distinct); which of them is a stop id."""
        at = self.length[slots]
        if len(at):
            self._reserve(int(at.max()) + 1)
        self._tokens[slots, at] = tokens
        self._logprobs[slots, at] = logprobs
        self.length[slots] = at + 1
        self.last[slots] = tokens
        return (self._stops[slots] == tokens[:, None]).any(axis=1)

    def sync(self, slot: int, version: int) -> Sequence:
        """The slot's sequence with all tokens sampled so far in it."""
        sequence = self.sequence(slot)
        length, known = int(self.length[slot]), len(sequence.logprobs)
        sequence.output_ids.extend(self._tokens[slot, len(sequence.output_ids) : length].tolist())
        sequence.logprobs.extend(self._logprobs[slot, known:length].tolist())
        sequence.versions.extend([version] * (length - known))
        return sequence

    def take(self, slot: int, version: int) -> Sequence:
        """Free the slot. Its pages are the caller's concern."""
        sequence = self.sync(slot, version)
        self.sequences[slot] = None
        self.state[slot] = State.FREE
        self._free.append(slot)
        return sequence

    def _set_stops(self, slot: int, ids: list[int]) -> None:
        missing = len(ids) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(ids)] = ids

    def _reserve(self, tokens: int) -> None:
        missing = tokens - self._tokens.shape[1]
        if missing > 0:
            extra = ((0, 0), (0, max(missing, self._tokens.shape[1])))
            self._tokens, self._logprobs = np.pad(self._tokens, extra), np.pad(self._logprobs, extra)

"""The engine of `rollout.numerics: fast`: decoding and prefill in one forward pass, bookkeeping over arrays.

A step takes every decoding sample one token further and, within a budget of tokens, computes prompts (once per group;
none of what the prefix cache knows) and the KV of samples that were preempted. Freed places are filled at once, so the
batch stays full while the tail of one request ends and the next begins. When pages run out the youngest sample is
preempted, so that the oldest always ends. Python runs per sample when it begins and ends, never per token (stop
strings apart, which only their samples pay for).

A request can also be split: `add_prefill` computes its prompt and each sample's first token for another engine, and
`add_prefilled` goes on from there (handoff.py). What is preempted, or meets new weights, is computed here as ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quintet.models.decoder.spec import ModelSpec
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.handoff import KVLayout, Prefilled
from quintet.rollout.engine.members import Decoding, Extra, Prompt, decoding_step, extra_step
from quintet.rollout.engine.prefix_cache import Node, PrefixCache
from quintet.rollout.engine.sequence import Decode, Finished, Intake, OnToken, Sequence, engine_failure
from quintet.rollout.engine.slots import Slots, State
from quintet.rollout.engine.step import PAGE, StepModel
from quintet.rollout.engine.sync import EngineStats
from quintet.types import FinishReason, Group, GroupId, Rollout, SamplingParams


@dataclass
class _Export:
    """KV of a prompt that another engine wants, and the weight version it was computed with."""

    kv: Tensor | None = None
    version: int = -1


class FastEngine:
    """`SyncEngine` over a `StepModel`.

    Args:
        make_model: from the number of KV pages to the model, weights not loaded yet.
        eos_ids: each of them ends a sample. decode: ids -> text, for stop strings and `Rollout.text`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        make_model: Callable[[int], StepModel],
        weights: Mapping[str, Tensor],
        *,
        eos_ids: Collection[int],
        decode: Decode,
        config: RolloutConfig,
        version: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version = version
        self.phase = "decode"
        self._decode, self._now, self._config = decode, now, config
        longest = spec.max_position
        # a sample's prompt and its response each end in a page of their own
        self._capacity = config.kv_pages or config.max_running * (-(-longest // PAGE) + 1)
        self.model = make_model(self._capacity)
        self.layout = KVLayout.of(spec, self.model.dtype)
        self._intake = Intake(frozenset(eos_ids), spec.vocab_size, longest)
        self._finished: list[Finished] = []
        self._waiting: deque[Sequence] = deque()
        self._exports: dict[int, _Export] = {}  # by request
        self._update_s = self._busy_s = 0.0
        self._sampled = self._preemptions = self._prompt_tokens = self._computed_tokens = 0
        self._numbers = 0
        self._reset()
        self._load(weights)

    def _reset(self) -> None:
        self._slots = Slots(self._config.max_running, self._intake.context or 0)
        self._prompts: dict[int, Prompt] = {}  # by number; those that running samples use
        self._by_request: dict[int, Prompt] = {}
        self._imports: dict[int, Tensor] = {}  # by request: KV that came with it, until its prompt has pages
        self._cache = PrefixCache(
            self._capacity, self._config.prefix_cache_pages, lambda pages: self.model.clear_pages(np.array(pages))
        )
        self._decoding = Decoding.empty()
        self._stale = True  # whether `_decoding` must be made anew

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        began = time.monotonic()
        self.model.load(weights)
        self._update_s += time.monotonic() - began

    @property
    def has_work(self) -> bool:
        return bool(self._finished or self._waiting or self._slots.state.any())

    def add_group(self, group: Group, params: SamplingParams, on_token: OnToken | None = None) -> int:
        request = self._intake.take_request()
        sequences = self._intake.sequences(request, group, params, self._now(), on_token)
        if self._accepts(sequences, self._too_long(sequences[0])):
            self._waiting.extend(sequences)
        return request

    def add_prefill(self, group: Group, params: SamplingParams) -> int:
        """As `add_group`, but each sample ends with its first token; `take_prefilled` gives what the others need."""
        request = self._intake.take_request()
        sequences = self._intake.sequences(request, group, params, self._now())
        goes_on = sequences[0].max_new > 1
        for sequence in sequences:
            sequence.max_new = 1
        if self._accepts(sequences, self._too_long(sequences[0])):
            self._waiting.extend(sequences)
            if goes_on:
                self._exports[request] = _Export()
        return request

    def take_prefilled(self, request: int, rollouts: list[Rollout]) -> Prefilled:
        """Once, when all samples of an `add_prefill` have ended: `rollouts`, with the KV if one of them goes on."""
        export = self._exports.pop(request, None)
        if export is None or export.kv is None or all(r.finish_reason is not FinishReason.LENGTH for r in rollouts):
            return Prefilled(self.version, self.layout, rollouts, None)
        return Prefilled(export.version, self.layout, rollouts, export.kv)

    def add_prefilled(
        self, group: Group, params: SamplingParams, found: Prefilled, on_token: OnToken | None = None
    ) -> int:
        """Go on from another engine's `take_prefilled`. Samples that ended there end here; a layout that is not this
        engine's ends all as failed. Raises PrefillFailed when the KV is of another weight version or request."""
        found.check(group, params, self.version)
        request = self._intake.take_request()
        sequences = self._intake.sequences(request, group, params, self._now(), on_token)
        if self._accepts(sequences, self._other_layout(found) or self._too_long(sequences[0])):
            for sequence, rollout in zip(sequences, found.rollouts, strict=True):
                sequence.take_over(rollout, self._now())
                if found.kv is not None and rollout.finish_reason is FinishReason.LENGTH:
                    self._waiting.append(sequence)
                else:
                    self._finished.append((request, rollout))
            if found.kv is not None:
                self._imports[request] = found.kv
        return request

    def step(self) -> list[Finished]:
        began = self._now()
        self._make_room()
        self._admit(began)
        extras = self._extras()
        decoding = self._plan_decoding()
        self.phase = "prefill" if extras else "decode"
        if extras or len(decoding.slots):
            self._advance(extras, decoding)
        self._busy_s += self._now() - began
        finished, self._finished = self._finished, []
        return finished

    def abort(self, group_ids: Collection[GroupId]) -> None:
        """Their samples end as aborted, with the tokens so far; the next `step` returns them."""
        self._abort(lambda s: s.group_id in group_ids)

    def abort_requests(self, requests: Collection[int]) -> None:
        self._abort(lambda s: s.request in requests)

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Whole or not at all. What runs is recomputed with the new weights and goes on with them."""
        self._load(weights)
        while len(used := self._slots.used):
            self._preempt(int(used[-1]))
        self._cache.clear()
        self._imports.clear()
        self.version = version

    def fail_all(self, message: str) -> list[Finished]:
        used = [self._slots.take(int(slot), self.version) for slot in self._slots.used]
        for sequence in [*used, *self._waiting]:
            self._end(sequence, FinishReason.FAILED, message, retryable=True)
        self._waiting.clear()
        self.model.clear_pages(np.arange(1, self._cache.highest + 1))
        self._reset()
        finished, self._finished = self._finished, []
        return finished

    def stats(self) -> EngineStats:
        return EngineStats(
            running=int(np.count_nonzero(self._slots.state)),
            waiting=len(self._waiting),
            kv_used=self._cache.in_use / self._cache.capacity,
            memory_bytes=self.model.bytes(self._cache.highest),
            sampled_tokens=self._sampled,
            busy_s=self._busy_s,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            computed_prompt_tokens=self._computed_tokens,
            update_s=self._update_s,
        )

    def prompt_logits(self, token_ids: list[int]) -> Tensor:
        """Logits [tokens, vocabulary] of every position, by the kernels that generate. Leaves no trace in the cache.

        Raises ValueError when the free pages do not hold the tokens.
        """
        count = -(-len(token_ids) // PAGE)
        if count > self._cache.available:
            raise ValueError(f"{len(token_ids)} tokens need more KV pages than are free")
        pages = self._cache.take(count)
        prompt = Prompt(0, 0, np.array(token_ids, dtype=np.int32), [], pages, 0)
        extra = Extra(prompt, None, prompt.ids, 0, np.array(pages, dtype=np.int32), 0, True, [])
        logits = self.model.logits(extra_step([extra], self._slots, every_logit=True))
        self._cache.give(pages)
        return logits

    def _accepts(self, sequences: list[Sequence], refusal: str | None) -> bool:
        """Whether a group's sequences may wait for their turn; else they end as failed."""
        refusal = self._intake.refusal(sequences[0].prompt_ids) or refusal
        for sequence in sequences if refusal else ():
            self._end(sequence, FinishReason.FAILED, f"prompt {sequence.group_id.prompt_id!r}: {refusal}")
        return refusal is None

    def _other_layout(self, found: Prefilled) -> str | None:
        if found.kv is None or found.layout == self.layout:
            return None
        return f"the prefill worker's KV is of {found.layout}; this engine's is of {self.layout}"

    def _too_long(self, sequence: Sequence) -> str | None:
        # The last sampled token is never fed back, so it needs no page.
        pages = -(-len(sequence.prompt_ids) // PAGE) + -(-(sequence.max_new - 1) // PAGE)
        if pages <= self._capacity:
            return None
        return f"{pages} KV pages are needed for its longest response, rollout.kv_pages is {self._capacity}"

    # Admission and preemption

    def _make_room(self) -> None:
        """One more own page for each decoding sample that has filled its last; the youngest are preempted for it."""
        slots = self._slots
        while True:
            full = slots.within(State.DECODE)
            full = full[slots.cached[full] == slots.pages[full] * PAGE]
            if len(full) <= self._cache.available:
                break
            self._preempt(int(slots.used[-1]))
        if len(full):
            slots.table[full, slots.pages[full]] = self._cache.take(len(full))
            slots.pages[full] += 1

    def _admit(self, now: float) -> None:
        while self._waiting and self._slots.free:
            sequence = self._waiting[0]
            prompt = self._by_request.get(sequence.request)
            ids = np.array(sequence.prompt_ids, dtype=np.int32) if prompt is None else prompt.ids
            chain = self._cache.match(ids) if prompt is None else prompt.chain
            known = sum(node.count for node in chain)
            own = -(-len(sequence.output_ids) // PAGE)
            new = -(-(len(ids) - known) // PAGE) if prompt is None else 0
            taken = sum(node.users == 0 for node in chain)  # available now, not after they are acquired
            # a page in reserve for each sample without one, so that an admission does not preempt itself at once
            reserve = int(np.count_nonzero(self._slots.pages[self._slots.state > 0] == 0)) + (not own)
            if own + new + taken + (reserve if self._slots.state.any() else 0) > self._cache.available:
                break
            self._waiting.popleft()
            if prompt is None:
                prompt = self._begin_prompt(sequence.request, ids, chain, known, new)
            self._place(sequence, prompt, own)
            sequence.started_at = now if sequence.started_at is None else sequence.started_at

    def _begin_prompt(self, request: int, ids: np.ndarray, chain: list[Node], known: int, pages: int) -> Prompt:
        self._cache.acquire(chain)
        self._numbers += 1
        prompt = Prompt(self._numbers, request, ids, chain, self._cache.take(pages), known)
        self._prompts[prompt.number] = self._by_request[request] = prompt
        kv = self._imports.pop(request, None)
        if kv is None:
            self._computed_tokens += len(ids) - known
        else:
            self._write_kv(prompt, kv)
        return prompt

    def _write_kv(self, prompt: Prompt, kv: Tensor) -> None:
        tokens = len(prompt.ids) - prompt.known
        counts = np.minimum(tokens - PAGE * np.arange(len(prompt.pages)), PAGE)
        self.model.write_kv(np.array(prompt.pages, dtype=np.int32), counts, kv[:, :, :, prompt.known :])
        self._note_prompt(prompt, tokens)

    def _read_kv(self, prompt: Prompt) -> None:
        """For who has asked for it, unless this weight version's is there already."""
        export = self._exports.get(prompt.request)
        if export is not None and export.version != self.version and prompt.ready:
            pages, counts = np.array([(node.page, node.count) for node in prompt.chain], dtype=np.int32).T
            export.kv, export.version = self.model.read_kv(pages, counts), self.version

    def _place(self, sequence: Sequence, prompt: Prompt, pages: int) -> None:
        slots = self._slots
        state = _first_state(prompt, sequence)
        slot = slots.put(sequence, prompt.number, state)
        slots.table[slot, :pages] = self._cache.take(pages)
        slots.pages[slot] = pages
        prompt.slots.add(slot)
        self._stale |= state is State.DECODE
        self._prompt_tokens += len(prompt.ids)

    def _preempt(self, slot: int) -> None:
        self._waiting.appendleft(self._leave(slot, keep=False))
        self._preemptions += 1

    def _leave(self, slot: int, *, keep: bool) -> Sequence:
        """Free the slot and its pages; `keep`: their tokens stay known to the prefix cache."""
        slots, prompt = self._slots, self._prompts[int(self._slots.prefix[slot])]
        sequence = slots.take(slot, self.version)
        pages, cached = slots.table[slot, : slots.pages[slot]].tolist(), int(slots.cached[slot])
        if keep and self._config.prefix_cache_pages:
            used = -(-cached // PAGE)
            known = np.array(sequence.output_ids[:cached], dtype=np.int32)
            self._cache.release(self._cache.insert(prompt.chain, known, pages[:used]))
            pages = pages[used:]
        self._cache.give(pages)
        prompt.slots.remove(slot)
        if not prompt.slots:
            if keep:
                self._read_kv(prompt)
            self._cache.give(prompt.pages)
            self._cache.release(prompt.chain)
            del self._prompts[prompt.number], self._by_request[prompt.request]
        self._stale = True
        return sequence

    def _abort(self, wanted: Callable[[Sequence], bool]) -> None:
        running = [int(slot) for slot in self._slots.used if wanted(self._slots.sequence(int(slot)))]
        taken = [self._leave(slot, keep=True) for slot in running]
        taken += [s for s in self._waiting if wanted(s)]
        self._waiting = deque(s for s in self._waiting if not wanted(s))
        left = {s.request for s in self._waiting}
        self._imports = {request: kv for request, kv in self._imports.items() if request in left}
        for sequence in sorted(taken, key=lambda s: s.arrival):
            self._end(sequence, FinishReason.ABORTED)

    # What a step computes

    def _extras(self) -> list[Extra]:
        """Prompts first, oldest first, then samples that start or start again, within the budget of tokens."""
        extras: list[Extra] = []
        budget = self._config.prefill_tokens
        for prompt in [p for p in self._prompts.values() if not p.ready]:
            if budget <= 0:
                return extras
            extras.append(self._prompt_chunk(prompt, budget))
            budget -= len(extras[-1].ids)
        starting = self._slots.within(State.START).tolist()
        for number in dict.fromkeys(self._slots.prefix[starting].tolist()):
            prompt = self._prompts[number]
            mine = [slot for slot in starting if self._slots.prefix[slot] == number]
            row = self._slots.table[mine[0]]
            extras.append(Extra(prompt, None, prompt.ids[-1:], len(prompt.ids) - 1, row, 0, False, mine))
            budget -= 1
        for slot in self._slots.within(State.REFILL).tolist():
            if budget <= 0:
                break
            extras.append(self._refill_chunk(slot, budget))
            budget -= len(extras[-1].ids)
        self._computed_tokens += sum(not extra.writes for extra in extras)
        return extras

    def _prompt_chunk(self, prompt: Prompt, budget: int) -> Extra:
        at = prompt.known + prompt.computed
        ids = prompt.ids[at : at + budget]
        whole = at + len(ids) == len(prompt.ids)
        samplers = [s for s in sorted(prompt.slots) if self._slots.length[s] == 0] if whole else []
        return Extra(prompt, None, ids, at, np.array(prompt.pages, dtype=np.int32), prompt.computed, True, samplers)

    def _refill_chunk(self, slot: int, budget: int) -> Extra:
        at = int(self._slots.cached[slot])
        known = self._slots.sequence(slot).output_ids
        ids = np.array(known[at : at + budget], dtype=np.int32)
        samplers = [slot] if at + len(ids) == len(known) else []
        prompt = self._prompts[int(self._slots.prefix[slot])]
        return Extra(prompt, slot, ids, len(prompt.ids) + at, self._slots.table[slot], at, True, samplers)

    def _plan_decoding(self) -> Decoding:
        if self._stale:
            self._decoding = Decoding.of(self._slots, self._prompts)
            self._stale = False
        return self._decoding

    # After a step

    def _advance(self, extras: list[Extra], decoding: Decoding) -> None:
        samplers = np.concatenate([decoding.slots, np.array([s for e in extras for s in e.samplers], np.int64)])
        step = decoding_step(decoding, self._slots)
        if extras:
            more = extra_step(extras, self._slots)
            step = step.then(more) if len(decoding.slots) else more
        tokens, logprobs = self.model.run(step)
        self._slots.cached[decoding.slots] += 1
        for extra in extras:
            self._note_computed(extra)
        self._take_tokens(samplers, tokens, logprobs)

    def _note_computed(self, extra: Extra) -> None:
        slots, prompt = self._slots, extra.prompt
        if extra.slot is not None:
            slots.cached[extra.slot] += len(extra.ids)
        elif extra.writes:
            self._note_prompt(prompt, len(extra.ids))
            if prompt.ready:
                slots.state[list(prompt.slots)] = State.REFILL
        if extra.samplers:
            slots.state[extra.samplers] = State.DECODE
            self._stale = True

    def _note_prompt(self, prompt: Prompt, tokens: int) -> None:
        prompt.computed += tokens
        if prompt.ready:
            prompt.chain = prompt.chain + self._cache.insert(prompt.chain, prompt.ids[prompt.known :], prompt.pages)
            prompt.pages = []

    def _take_tokens(self, samplers: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        slots, now = self._slots, self._now()
        for slot in samplers[slots.length[samplers] == 0].tolist():
            slots.sequence(slot).first_token_at = now
        wrong = np.isnan(logprobs)
        if wrong.any():
            self._fail_wrong(samplers[wrong])
            samplers, tokens, logprobs = samplers[~wrong], tokens[~wrong], logprobs[~wrong]
        self._sampled += len(samplers)
        stopped = slots.append(samplers, tokens, logprobs)
        for index in np.flatnonzero(slots.listened[samplers]).tolist():
            slots.sequence(int(samplers[index])).tell(int(tokens[index]), float(logprobs[index]), self.version)
        if slots.with_strings[samplers].any():
            stopped |= self._stop_strings(samplers, stopped)
        ended = stopped | (slots.length[samplers] >= slots.limit[samplers])
        for index in np.flatnonzero(ended).tolist():
            reason = FinishReason.STOP if stopped[index] else FinishReason.LENGTH
            self._end(slots.sync(int(samplers[index]), self.version), reason)
            self._leave(int(samplers[index]), keep=True)

    def _stop_strings(self, samplers: np.ndarray, stopped: np.ndarray) -> np.ndarray:
        found = np.zeros(len(samplers), dtype=bool)
        for index in np.flatnonzero(self._slots.with_strings[samplers] & ~stopped).tolist():
            sequence = self._slots.sync(int(samplers[index]), self.version)
            found[index] = sequence.stop_string_ends_here(self._decode)
        return found

    def _fail_wrong(self, samplers: np.ndarray) -> None:
        """Samples whose logits are not finite end; what may hold NaN of theirs is zeroed or kept from others."""
        for slot in samplers.tolist():
            for node in self._prompts[int(self._slots.prefix[slot])].chain:
                node.tainted = True
            self.model.clear_pages(self._slots.table[slot, : self._slots.pages[slot]])
            sequence = self._slots.sync(slot, self.version)
            self._end(sequence, FinishReason.FAILED, "the model's logits are not finite")
            self._leave(slot, keep=False)

    def _end(
        self, sequence: Sequence, reason: FinishReason, message: str | None = None, *, retryable: bool = False
    ) -> None:
        failure = None if message is None else engine_failure(message, retryable=retryable)
        self._finished.append((sequence.request, sequence.rollout(reason, self._now(), self._decode, failure)))


def _first_state(prompt: Prompt, sequence: Sequence) -> State:
    if not prompt.ready:
        return State.PROMPT
    return (State.START, State.DECODE, State.REFILL)[min(len(sequence.output_ids), 2)]

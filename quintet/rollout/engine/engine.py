"""The engine of `rollout.numerics: reproducible`: `step()` is schedule -> run -> postprocess."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from quintet.models.decoder.numerics import reproducible_kernels, settle_row_counts
from quintet.models.decoder.spec import read_spec
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.attention import Planner, Segment
from quintet.rollout.engine.kv_cache import KVCache
from quintet.rollout.engine.model import DecoderModel
from quintet.rollout.engine.sampling import SamplingRows, keyed_uniform, sample
from quintet.rollout.engine.scheduler import Scheduler, Work
from quintet.rollout.engine.sequence import Decode, Finished, Intake, OnToken, Sequence, engine_failure
from quintet.rollout.engine.sync import EngineStats
from quintet.types import FinishReason, Group, GroupId, SamplingParams


class Engine:
    """Continuous batching over a paged KV cache.

    Args:
        hf_config: decides architecture and sizes; QuintetError if the engine does not know it.
        weights: Hugging Face state dict, LoRA merged.
        eos_ids: each of them ends a sample.
        decode: ids -> text, for stop strings and `Rollout.text`.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        weights: Mapping[str, Tensor],
        *,
        eos_ids: Collection[int],
        decode: Decode,
        config: RolloutConfig,
        device: torch.device,
        dtype: torch.dtype,
        version: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        spec = read_spec(hf_config)
        kernels = reproducible_kernels(config.page_size, dtype)
        self.version = version
        self.phase = "decode"
        self._decode = decode
        self._now = now
        self._model = DecoderModel(spec, kernels, device, dtype)
        self._model.load(weights)
        settle_row_counts(kernels, self._model.products, spec.head_dim)
        pages = config.kv_pages or config.max_running * -(-spec.max_position // config.page_size)
        self._cache = KVCache(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            page_size=config.page_size,
            capacity=pages,
            device=device,
            dtype=dtype,
        )
        self._scheduler = Scheduler(self._cache, max_running=config.max_running, prefill_tokens=config.prefill_tokens)
        self._planner = Planner(spec, kernels, config.page_size, device, dtype)
        self._intake = Intake(frozenset(eos_ids), spec.vocab_size, spec.max_position)
        self._finished: list[Finished] = []
        self._sampled_tokens = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._finished or self._scheduler.waiting or self._scheduler.running)

    def add_group(self, group: Group, params: SamplingParams, on_token: OnToken | None = None) -> int:
        request = self._intake.take_request()
        refusal = self._intake.refusal(group.prompt.token_ids)
        sequences = self._intake.sequences(request, group, params, self._now(), on_token)
        refusal = refusal or self._too_long(sequences[0])
        if refusal is not None:
            for sequence in sequences:
                self._end(sequence, FinishReason.FAILED, f"prompt {group.prompt.id!r}: {refusal}")
        else:
            self._scheduler.add(sequences)
        return request

    def step(self) -> list[Finished]:
        began = self._now()
        work = self._scheduler.schedule(began)
        self.phase = self._scheduler.phase
        if work:
            tokens, logprobs = self._run(work)
            self._postprocess(work, tokens, logprobs)
        self._busy_s += self._now() - began
        finished, self._finished = self._finished, []
        return finished

    def abort(self, group_ids: Collection[GroupId]) -> None:
        """Their samples end as aborted, with the tokens so far; the next `step` returns them."""
        for sequence in self._scheduler.take_matching(lambda s: s.group_id in group_ids):
            self._end(sequence, FinishReason.ABORTED)

    def abort_requests(self, requests: Collection[int]) -> None:
        for sequence in self._scheduler.take_matching(lambda s: s.request in requests):
            self._end(sequence, FinishReason.ABORTED)

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Whole or not at all. What runs is recomputed with the new weights and goes on with them."""
        self._model.load(weights)
        self.version = version
        self._scheduler.preempt_all()

    def fail_all(self, message: str) -> list[Finished]:
        for sequence in self._scheduler.clear():
            self._end(sequence, FinishReason.FAILED, message, retryable=True)
        self._cache.reset()
        finished, self._finished = self._finished, []
        return finished

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_used=self._cache.pool.used / self._cache.pool.capacity,
            memory_bytes=self._model.bytes + self._cache.bytes,
            sampled_tokens=self._sampled_tokens,
            busy_s=self._busy_s,
            preemptions=scheduler.preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            computed_prompt_tokens=scheduler.computed_prompt_tokens,
        )

    @torch.inference_mode()
    def prompt_logits(self, token_ids: list[int]) -> Tensor:
        """Logits [tokens, vocabulary] of every position, by the kernels that generate. Leaves no trace in the cache.

        Raises ValueError when the free pages do not hold the tokens.
        """
        pages: list[int] = []
        if self._cache.missing(pages, 0, len(token_ids)) > self._cache.pool.free:
            raise ValueError(f"{len(token_ids)} tokens need more KV pages than are free")
        self._cache.make_writable(pages, 0, len(token_ids))
        plan = self._planner.plan([Segment(token_ids, 0, pages)], every_logit=True)
        logits = self._model.forward(plan, self._cache)
        self._cache.pool.release(pages)
        return logits

    def _too_long(self, sequence: Sequence) -> str | None:
        # The last sampled token is never fed back, so it needs no page.
        pages = self._cache.pages_for(len(sequence.prompt_ids) + sequence.max_new - 1)
        if pages <= self._cache.capacity:
            return None
        return f"{pages} KV pages are needed for its longest response, rollout.kv_pages is {self._cache.capacity}"

    @torch.inference_mode()
    def _run(self, work: list[Work]) -> tuple[list[int], list[float]]:
        """One token and its log-probability per sampler, in the order of work and samplers."""
        plan = self._planner.plan([w.segment for w in work])
        logits = self._model.forward(plan, self._cache)
        samplers = [s for w in work for s in w.samplers]
        if len(samplers) != len(work):
            repeats = torch.tensor([len(w.samplers) for w in work], device=logits.device)
            logits = logits.repeat_interleave(repeats, dim=0)
        ids_B, logprobs_B = sample(logits, sampling_rows(samplers))
        return ids_B.tolist(), logprobs_B.tolist()

    def _postprocess(self, work: list[Work], tokens: list[int], logprobs: list[float]) -> None:
        now = self._now()
        samplers = [s for w in work for s in w.samplers]
        for sequence, token, logprob in zip(samplers, tokens, logprobs, strict=True):
            if logprob != logprob:
                self._end(sequence, FinishReason.FAILED, "the model's logits are not finite")
                self._cache.scrub(sequence.pages)
                self._scheduler.finish(sequence)
                continue
            self._sampled_tokens += 1
            reason = sequence.append(token, logprob, self.version, now, self._decode)
            if reason is not None:
                self._end(sequence, reason)
                self._scheduler.finish(sequence)

    def _end(
        self, sequence: Sequence, reason: FinishReason, message: str | None = None, *, retryable: bool = False
    ) -> None:
        failure = None if message is None else engine_failure(message, retryable=retryable)
        self._finished.append((sequence.request, sequence.rollout(reason, self._now(), self._decode, failure)))


def sampling_rows(sequences: list[Sequence]) -> SamplingRows:
    """Settings and keyed draws for the next token of each sequence."""
    params = [s.params for s in sequences]
    keys = np.array([s.key for s in sequences], dtype=np.uint64)
    positions = np.array([s.params.first_position + len(s.output_ids) for s in sequences], dtype=np.uint64)
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        uniform=keyed_uniform(keys, positions),
    )

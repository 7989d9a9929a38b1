"""Rollouts with a model's own transformers forward: any causal language model, left-padded batches.

The same sampler, stop rules and failures as the embedded engine. Left out on purpose: paging and prompt sharing (each
sample holds its whole context), and reproducible numerics (the model's own kernels decide about the bits).
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.engine import sampling_rows
from quintet.rollout.engine.loading import load_weights
from quintet.rollout.engine.sampling import sample
from quintet.rollout.engine.sequence import Decode, Finished, Intake, OnToken, Sequence, engine_failure
from quintet.rollout.engine.sync import EngineStats
from quintet.rollout.engine.worker import EngineWorker
from quintet.types import FinishReason, Group, GroupId, QuintetError, SamplingParams


class TransformersEngine:
    """A `SyncEngine` over one model, which it owns from then on (weights are updated in place)."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Collection[int],
        decode: Decode,
        config: RolloutConfig,
        version: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.numerics == "reproducible":
            raise QuintetError(
                "rollout.numerics: reproducible is kept by rollout.engine: embedded only; set rollout.numerics: fast."
            )
        self.version = version
        self.phase = "decode"
        self._model = model.eval()
        self._decode = decode
        self._now = now
        self._max_running = config.max_running
        text_config = model.config.get_text_config()
        self._intake = Intake(
            frozenset(eos_ids), text_config.vocab_size, getattr(text_config, "max_position_embeddings", None)
        )
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._takes_positions = "position_ids" in accepted
        self._takes_keep = "logits_to_keep" in accepted
        self._waiting: deque[Sequence] = deque()
        self._batch: list[Sequence] = []  # in the order of the cache's rows
        self._cache: DynamicCache | None = None  # None: the batch must be prefilled
        self._mask_BT = torch.empty(0)
        self._finished: list[Finished] = []
        self._sampled_tokens = self._prompt_tokens = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._finished or self._waiting or self._batch)

    def add_group(self, group: Group, params: SamplingParams, on_token: OnToken | None = None) -> int:
        request = self._intake.take_request()
        sequences = self._intake.sequences(request, group, params, self._now(), on_token)
        refusal = self._intake.refusal(group.prompt.token_ids)
        if refusal is None:
            self._waiting.extend(sequences)
        else:
            for sequence in sequences:
                self._end(sequence, FinishReason.FAILED, f"prompt {group.prompt.id!r}: {refusal}")
        return request

    def step(self) -> list[Finished]:
        began = self._now()
        self._admit(began)
        if self._batch:
            tokens, logprobs = self._run()
            self._postprocess(tokens, logprobs)
        self._busy_s += self._now() - began
        finished, self._finished = self._finished, []
        return finished

    def abort(self, group_ids: Collection[GroupId]) -> None:
        self._abort_where(lambda s: s.group_id in group_ids)

    def abort_requests(self, requests: Collection[int]) -> None:
        self._abort_where(lambda s: s.request in requests)

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Whole or not at all; the running batch is prefilled again with the new weights and goes on."""
        load_weights(self._model.state_dict(), weights)
        self.version = version
        self._cache = None

    def fail_all(self, message: str) -> list[Finished]:
        ended = [*self._batch, *self._waiting]
        self._batch, self._waiting, self._cache = [], deque(), None
        for sequence in ended:
            self._end(sequence, FinishReason.FAILED, message, retryable=True)
        finished, self._finished = self._finished, []
        return finished

    def stats(self) -> EngineStats:
        weights = {t.data_ptr(): t.numel() * t.element_size() for t in self._model.state_dict().values()}
        return EngineStats(
            running=len(self._batch),
            waiting=len(self._waiting),
            kv_used=len(self._batch) / self._max_running,
            memory_bytes=sum(weights.values()),
            sampled_tokens=self._sampled_tokens,
            busy_s=self._busy_s,
            preemptions=0,
            prompt_tokens=self._prompt_tokens,
            computed_prompt_tokens=self._prompt_tokens,
        )

    def _admit(self, now: float) -> None:
        """New sequences join once half the rows are free: joining costs a prefill of the whole batch."""
        if not self._waiting or 2 * len(self._batch) > self._max_running:
            return
        self._cache = None
        while self._waiting and len(self._batch) < self._max_running:
            sequence = self._waiting.popleft()
            sequence.started_at = now
            self._prompt_tokens += len(sequence.prompt_ids)
            self._batch.append(sequence)

    @torch.inference_mode()
    def _run(self) -> tuple[list[int], list[float]]:
        self.phase = "prefill" if self._cache is None else "decode"
        if self._cache is None:
            ids_BT, positions_BT = self._prefill_inputs()
            self._cache = DynamicCache(config=self._model.config)
        else:
            ids_BT = self._long([[s.output_ids[-1]] for s in self._batch])
            positions_BT = self._long([[s.length - 1] for s in self._batch])
            self._mask_BT = torch.cat([self._mask_BT, torch.ones_like(ids_BT)], dim=1)
        inputs: dict[str, Any] = {self._cache_name: self._cache}
        if self._takes_positions:
            inputs["position_ids"] = positions_BT
        if self._takes_keep:
            inputs["logits_to_keep"] = 1
        out = self._model(input_ids=ids_BT, attention_mask=self._mask_BT, use_cache=True, **inputs)
        ids_B, logprobs_B = sample(out.logits[:, -1], sampling_rows(self._batch))
        return ids_B.tolist(), logprobs_B.tolist()

    def _prefill_inputs(self) -> tuple[Tensor, Tensor]:
        rows = [s.tokens_from(0) for s in self._batch]
        longest = max(map(len, rows))
        ids_BT = self._long([[0] * (longest - len(row)) + row for row in rows])
        self._mask_BT = self._long([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        return ids_BT, (self._mask_BT.cumsum(-1) - 1).clamp_min(0)

    def _long(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.long, device=self._model.device)

    def _postprocess(self, tokens: list[int], logprobs: list[float]) -> None:
        now = self._now()
        alive: list[int] = []
        for row, (sequence, token, logprob) in enumerate(zip(self._batch, tokens, logprobs, strict=True)):
            if logprob != logprob:
                self._end(sequence, FinishReason.FAILED, "the model's logits are not finite")
                continue
            self._sampled_tokens += 1
            reason = sequence.append(token, logprob, self.version, now, self._decode)
            if reason is None:
                alive.append(row)
            else:
                self._end(sequence, reason)
        self._keep_rows(alive)

    def _abort_where(self, wanted: Callable[[Sequence], bool]) -> None:
        for sequence in [s for s in (*self._batch, *self._waiting) if wanted(s)]:
            self._end(sequence, FinishReason.ABORTED)
        self._waiting = deque(s for s in self._waiting if not wanted(s))
        self._keep_rows([row for row, s in enumerate(self._batch) if not wanted(s)])

    @torch.inference_mode()
    def _keep_rows(self, rows: list[int]) -> None:
        if len(rows) == len(self._batch):
            return
        self._batch = [self._batch[row] for row in rows]
        if not rows:
            self._cache = None
        elif self._cache is not None:
            index = torch.tensor(rows, device=self._mask_BT.device)
            self._cache.batch_select_indices(index)
            self._mask_BT = self._mask_BT[index]

    def _end(
        self, sequence: Sequence, reason: FinishReason, message: str | None = None, *, retryable: bool = False
    ) -> None:
        failure = None if message is None else engine_failure(message, retryable=retryable)
        self._finished.append((sequence.request, sequence.rollout(reason, self._now(), self._decode, failure)))


class TransformersRolloutWorker(EngineWorker):
    """Any Hugging Face causal LM behind the rollout protocol. The worker owns `model` from then on."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Collection[int],
        decode: Decode,
        config: RolloutConfig,
        version: int = 0,
    ) -> None:
        super().__init__(TransformersEngine(model, eos_ids=eos_ids, decode=decode, config=config, version=version))

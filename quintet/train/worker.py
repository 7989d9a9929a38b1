"""The train worker of one process: a protocol on the outside, one thread that does the work inside.

The event loop stays free: every method hands its work to the worker's own thread, where calls run one
after the other. Left out: more than one device.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quintet.algorithms.presets import Algorithm
from quintet.models.decoder.numerics import Kernels
from quintet.models.export import save_hf_folder
from quintet.models.lora import merged_state_dict
from quintet.models.tokenizer import Tokenizer
from quintet.train import checkpoint
from quintet.train.batching import micro_batches, token_sample
from quintet.train.config import TrainConfig
from quintet.train.critic import Critic
from quintet.train.forward import PolicyForward, ReferenceRows
from quintet.train.kl import KlCoefficient
from quintet.train.optimizer import Optimizer
from quintet.train.packing import TokenSample
from quintet.train.update import PolicyUpdate
from quintet.train.value import ValueModel
from quintet.types import Experience, ExperienceBatch, QuintetError, Span, StepAbandoned, TrainMetrics, WeightRef

T = TypeVar("T")


class WeightStore(Protocol):
    """Where weights are published: `weights.memory.MemoryStore`, `weights.file.FileStore`."""

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> WeightRef: ...


class LocalTrainWorker:
    """`protocols.TrainWorker` over a transformers model (full or LoRA through peft) on one device.

    `total_steps` counts controller steps: the schedule runs over total_steps x epochs x mini_batches
    optimizer steps. The frozen reference, where the algorithm needs one, is `ref_model`; without it the
    base under the adapters (LoRA), or a copy of `model` as it is now; a critic, where the algorithm has one, starts
    from a copy too. `dtype` bfloat16 means autocast over float32 weights. `on_span` is told of each forward, backward
    and optimizer step, from the worker's thread. Once `stopping()` is true, work that has changed no weight yet ends
    after the micro-batch in progress, with StepAbandoned. `kernels`: those of the reproducible engine
    (`train.exact.trainer_kernels`), for log-probabilities equal to the sampler's. Raises `QuintetError` for options
    that cannot go together.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Tokenizer,
        config: TrainConfig,
        algorithm: Algorithm,
        temperature: float,
        total_steps: int,
        dtype: torch.dtype,
        store: WeightStore,
        ref_model: nn.Module | None = None,
        seed: int = 0,
        on_span: Callable[[Span], None] = lambda span: None,
        stopping: Callable[[], bool] = lambda: False,
        kernels: Kernels | None = None,
    ) -> None:
        if (message := config.conflict()) is not None:
            raise QuintetError(message)
        if temperature <= 0.0:
            raise QuintetError(
                f"rollout.temperature: {temperature:g} cannot be trained: greedy samples have no log-probability\n"
                "use a temperature above 0 (1.0); eval can be greedy all the same"
            )
        if algorithm.needs_proximal and config.old != "trainer":
            raise QuintetError(
                f"algorithm.correction compares the trainer's policy with the sampler's; train.old is {config.old}\n"
                "set train.old: trainer"
            )
        torch.manual_seed(seed)  # LoRA dropout draws from torch's global generator, which the checkpoint keeps
        self.model = model
        self._tokenizer = tokenizer
        self._config = config
        self._algorithm = algorithm
        self._store = store
        self._kernels = kernels
        self._reference = _reference(model, ref_model, algorithm)
        value_model = ValueModel(model) if algorithm.needs_values else None  # a copy, before the attention is replaced
        self._forward = self._policy_forward(model, temperature, dtype)
        self._ref_forward = self._forward
        if self._reference is not None:
            self._ref_forward = self._policy_forward(self._reference, temperature, dtype)
        optimizer_steps = total_steps * config.epochs * config.mini_batches
        optimizer = Optimizer(model, config, optimizer_steps)
        self._critic = None if value_model is None else Critic.of(value_model, config, optimizer_steps, dtype)
        self._kl = KlCoefficient.of(algorithm)
        self._state = checkpoint.TrainState(model, optimizer, self._reference, self._critic, self._kl)
        reference = self._reference_rows if algorithm.needs_full_kl and algorithm.kl_in_loss else None
        if algorithm.needs_full_kl:
            _ = self._ref_forward.plain_head  # refuses a model that has none
        self._update = PolicyUpdate(
            self._forward, optimizer, algorithm, config, on_span, self._critic, stopping, reference
        )
        self._stopping = stopping
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="train-worker",
            initializer=torch.set_num_threads,  # OpenMP keeps the number per thread
            initargs=(torch.get_num_threads(),),
        )

    async def prepare(self, batch: ExperienceBatch) -> ExperienceBatch:
        """Fill `ref_logprobs` (only when the algorithm needs a reference) and `proximal_logprobs` (only for
        `old: trainer`) and `values` (only with a critic) of every scored sample; 0.0 on tokens that are not trained."""
        return await self._in_thread(lambda: self._prepare(batch))

    async def logprobs(self, samples: Sequence[Experience]) -> list[list[float]]:
        """Of each sample's response tokens under the weights as they are; 0.0 on tokens that are not trained."""
        return await self._in_thread(lambda: self._logprobs(self._forward, samples))

    async def full_kl(self, samples: Sequence[Experience]) -> list[list[float]]:
        """Of each sample's response tokens, between the policy's whole distribution and the reference's (a row with
        that KL only); 0.0 on tokens that are not trained."""
        return await self._in_thread(lambda: self._full_kl(samples))

    async def update(self, batch: ExperienceBatch) -> TrainMetrics:
        return await self._in_thread(lambda: self._run_update(batch))

    async def publish(self, version: int) -> WeightRef:
        """Publish the weights under the model's plain names, LoRA merged."""
        return await self._in_thread(lambda: self._store.publish(merged_state_dict(self.model), version))

    async def save_checkpoint(self, path: str) -> None:
        await self._in_thread(lambda: checkpoint.save(self._state, path))

    async def load_checkpoint(self, path: str) -> None:
        await self._in_thread(lambda: checkpoint.load(self._state, path))

    async def export(self, path: str) -> None:
        await self._in_thread(lambda: save_hf_folder(self.model, self._tokenizer, path))

    async def close(self) -> None:
        """Wait for the work in progress, end the thread and give the model its own attention back."""
        await asyncio.to_thread(self._executor.shutdown)
        self._forward.release()
        self._ref_forward.release()
        if self._critic is not None:
            self._critic.forward.release()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _policy_forward(self, model: nn.Module, temperature: float, dtype: torch.dtype) -> PolicyForward:
        return PolicyForward(
            model,
            temperature=temperature,
            dtype=dtype,
            shared_prompt=self._config.shared_prompt,
            head_chunk_tokens=self._config.head_chunk_tokens,
            activation_checkpointing=self._config.activation_checkpointing,
            fused_kernels=self._config.kernels,
            kernels=self._kernels,
        )

    def _prepare(self, batch: ExperienceBatch) -> ExperienceBatch:
        scored = [e for e in batch.experiences if e.reward is not None]
        batch.kl_coef = None if self._kl is None else self._kl.value
        if self._algorithm.needs_full_kl and not self._algorithm.kl_in_loss:
            for sample, kl in zip(scored, self._full_kl(scored), strict=True):
                sample.full_kl = kl
        elif self._algorithm.needs_ref and not self._algorithm.needs_full_kl:
            for sample, logprobs in zip(scored, self._reference_logprobs(scored), strict=True):
                sample.ref_logprobs = logprobs
        if self._config.old == "trainer":
            for sample, logprobs in zip(scored, self._logprobs(self._forward, scored), strict=True):
                sample.proximal_logprobs = logprobs
        if self._critic is not None:
            self._critic.fill_values(scored, bootstrap=self._algorithm.needs_bootstrap)
        return batch

    def _run_update(self, batch: ExperienceBatch) -> TrainMetrics:
        trained = self._update.run(batch)
        if self._kl is not None:
            self._kl.adapt(batch.metrics | trained.values, int(trained.values["actor/samples"]))
            trained.values["kl/coef"] = self._kl.value
        return trained

    def _adapters_off(self) -> AbstractContextManager[Any]:
        """The reference where it has no model of its own: LoRA's base."""
        model: Any = self.model
        return model.disable_adapter() if self._reference is None else nullcontext()

    def _reference_logprobs(self, samples: Sequence[Experience]) -> list[list[float]]:
        with self._adapters_off():
            return self._logprobs(self._ref_forward, samples)

    @torch.no_grad()
    def _reference_rows(self, samples: Sequence[TokenSample]) -> ReferenceRows:
        assert self._algorithm.kl is not None
        with self._adapters_off():
            hidden_ND, _, _ = self._ref_forward.hidden_states(samples)
        return ReferenceRows(hidden_ND, self._ref_forward.plain_head, self._algorithm.kl.params["direction"])

    def _full_kl(self, samples: Sequence[Experience]) -> list[list[float]]:
        def kl_of(inputs: Sequence[TokenSample]) -> Tensor:
            kl_BT = self._forward(inputs, self._reference_rows(inputs)).kl_BT
            assert kl_BT is not None
            return kl_BT

        return self._per_token(self._forward, samples, kl_of)

    def _logprobs(self, forward: PolicyForward, samples: Sequence[Experience]) -> list[list[float]]:
        return self._per_token(forward, samples, lambda inputs: forward(inputs).logprobs_BT)

    @torch.no_grad()
    def _per_token(
        self,
        forward: PolicyForward,
        samples: Sequence[Experience],
        compute: Callable[[Sequence[TokenSample]], Tensor],
    ) -> list[list[float]]:
        """One list per sample, as long as its response; a sample without loss tokens costs no forward."""
        forward.model.eval()
        out = [[0.0] * len(e.response_ids) for e in samples]
        wanted = [i for i, e in enumerate(samples) if any(e.loss_mask)]
        inputs = [token_sample(samples[i]) for i in wanted]
        for run in micro_batches(inputs, self._config.micro_batch_tokens, forward.layout):
            if self._stopping():
                raise StepAbandoned
            rows = compute(inputs[run.start : run.stop]).tolist()
            for n, row in zip(run, rows, strict=True):
                out[wanted[n]] = row[: len(inputs[n].response_ids)]
        return out


def _reference(model: nn.Module, given: nn.Module | None, algorithm: Algorithm) -> nn.Module | None:
    """The frozen reference as a model of its own; None where none is needed or LoRA's base serves."""
    if not algorithm.needs_ref:
        return None
    if given is None and not isinstance(model, PreTrainedModel):
        return None
    reference = copy.deepcopy(model) if given is None else given
    return reference.requires_grad_(False).eval()

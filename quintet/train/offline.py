"""The one loop over given answers: DPO and its relatives, KTO, reward models, supervised fine-tuning, the warm start.

Same forward, optimizer, batching and checkpoint as the RL worker. A step's loss is divided once, by the counts of the
whole step, so that micro-batches change nothing. A pair is never cut, and its prompt is computed once.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.offline import OfflineAlgorithm, resolve_offline
from quintet.algorithms.preference import kto_baseline
from quintet.data.answers import Answered
from quintet.train import checkpoint
from quintet.train.batching import micro_batches, unit_batches
from quintet.train.config import TrainConfig, WarmStartConfig
from quintet.train.forward import PolicyForward
from quintet.train.metrics import MetricSums
from quintet.train.objectives import AnswerScores, StepTotals, objective_share, reward_stats
from quintet.train.optimizer import Optimizer
from quintet.train.packing import TokenSample
from quintet.train.value import ValueForward, ValueModel, after_last_token

log = logging.getLogger(__name__)

Example = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids
Progress = Callable[[int, dict[str, float]], None]  # optimizer step from 1, its metrics
EVAL_ROWS = 64  # rows whose batch-wide quantities (KTO's z0) are formed together when nothing is trained


class OfflineTrainer:
    """A model, its optimizer and an objective. Calls block; one thread at a time.

    The frozen reference, where the objective needs one, is the model as it is now (under LoRA its base). A reward
    model starts from the model's body (under LoRA its adapters and the head are trained); `model` then holds the
    `ValueModel` that is trained. Of `config` the optimizer,
    schedule and memory options count. `close()` gives the model its own attention back.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        algorithm: OfflineAlgorithm,
        config: TrainConfig,
        total_steps: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)  # LoRA dropout draws from torch's global generator, which the checkpoint keeps
        self._algorithm, self._config = algorithm, config
        reference = None
        if algorithm.needs_ref and isinstance(model, PreTrainedModel):
            reference = copy.deepcopy(model).requires_grad_(False).eval()
        self._value_forward: ValueForward | None = None
        self._forward: PolicyForward | None = None
        if algorithm.trains_reward:
            self.model: nn.Module = ValueModel(model, bias=False, keep_adapters=True)
            self._value_forward = ValueForward(self.model, config, dtype)
        else:
            self.model = model
            self._forward = self._policy_forward(model, dtype)
        self._ref_forward = self._forward if reference is None else self._policy_forward(reference, dtype)
        self._optimizer = Optimizer(self.model, config, total_steps)
        self._state = checkpoint.TrainState(self.model, self._optimizer, reference)

    def step(self, batch: Sequence[Answered]) -> dict[str, float]:
        """One optimizer step; `offline/*` and of pairs `pairs/*`, of labelled answers `labels/*`."""
        if self._forward is not None:
            self._forward.training_mode()
        self._optimizer.zero_grad()
        sums = MetricSums()
        loss = self._run(batch, sums, backward=True)
        result = self._optimizer.step()
        return sums.values() | {
            "offline/loss": loss,
            "offline/grad_norm": result.grad_norm,
            "offline/lr": result.lr,
            "offline/rows": float(len(batch)),
            "offline/tokens": float(sum(len(s.response_ids) for e in batch for s in self._unit(e))),
            "offline/skipped_nonfinite": float(not result.applied),
        }

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Answered]) -> dict[str, float]:
        """`eval/loss`, `eval/n`, and of pairs `eval/pair_accuracy` and `eval/margin`, over rows not trained on."""
        self.model.eval()
        sums = MetricSums()
        for start in range(0, len(rows), EVAL_ROWS):
            part = rows[start : start + EVAL_ROWS]
            sums.add_value("loss", self._run(part, sums, backward=False) * len(part), float(len(part)))
        names = {"pairs/accuracy": "eval/pair_accuracy", "pairs/margin": "eval/margin", "loss": "eval/loss"}
        values = {names.get(name, f"eval/{name}"): value for name, value in sums.values().items()}
        return values | {"eval/n": float(len(rows))}

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Weights, optimizer, reference and random states into an existing empty folder."""
        checkpoint.save(self._state, path)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        checkpoint.load(self._state, path)

    def close(self) -> None:
        for forward in (self._forward, self._ref_forward, self._value_forward):
            if forward is not None:
                forward.release()

    def _policy_forward(self, model: nn.Module, dtype: torch.dtype) -> PolicyForward:
        return PolicyForward(
            model,
            dtype=dtype,
            shared_prompt=self._config.shared_prompt,
            head_chunk_tokens=self._config.head_chunk_tokens,
            activation_checkpointing=self._config.activation_checkpointing,
            fused_kernels=self._config.kernels,
        )

    def _unit(self, row: Answered) -> list[TokenSample]:
        """The answers of a row that the objective looks at; they stay in one micro-batch."""
        uses_rejected = self._algorithm.objective.name != "likelihood" and row.rejected_ids is not None
        answers = [row.response_ids, *([row.rejected_ids] if uses_rejected else [])]
        if self._algorithm.trains_reward:
            return [after_last_token(row.prompt_ids, a) for a in answers if a is not None]
        masks = [row.trained, [1] * len(answers[-1] or ())]
        return [TokenSample(row.prompt_ids, a, m) for a, m in zip(answers, masks, strict=False) if a is not None]

    def _run(self, batch: Sequence[Answered], sums: MetricSums, *, backward: bool) -> float:
        """The loss of a step's rows; with `backward` its gradient is accumulated."""
        cell, total = self._algorithm.objective, 0.0
        units = [self._unit(row) for row in batch]
        totals = StepTotals(
            rows=float(len(units)),
            answers=float(sum(map(len, units))),
            wanted_tokens=float(sum(sum(row.trained) for row in batch)),
            baseline=self._baseline(batch) if cell.name == "kto" else None,
        )
        for run in unit_batches(units, self._config.micro_batch_tokens, self._layout):
            scores = self._scores(units[run.start : run.stop], batch[run.start : run.stop])
            share, rewards_N = objective_share(cell.name, cell.params, scores, totals)
            if backward:
                share.backward()
            total += float(share.detach())
            if cell.name != "likelihood":
                sums.add(reward_stats(rewards_N, scores))
        return total

    @property
    def _layout(self) -> Any:
        forward = self._forward or self._value_forward
        assert forward is not None
        return forward.layout

    def _scores(self, units: Sequence[list[TokenSample]], rows: Sequence[Answered]) -> AnswerScores:
        samples = [s for unit in units for s in unit]
        pairs = [(row, i) for row, unit in zip(rows, units, strict=True) for i in range(len(unit))]
        total_N = self._totals(samples)
        device = total_N.device
        return AnswerScores(
            total_N=total_N,
            tokens_N=torch.tensor([float(sum(s.loss_mask)) for s in samples], device=device),
            desirable_N=torch.tensor([row.desirable and i == 0 for row, i in pairs], device=device),
            margin_N=torch.tensor([row.margin for row, _ in pairs], device=device),
            paired=all(len(unit) == 2 for unit in units),
            ref_N=self._reference_totals(samples) if self._algorithm.needs_ref else None,
        )

    def _totals(self, samples: Sequence[TokenSample]) -> Tensor:
        if self._value_forward is not None:
            return self._value_forward(samples).values_BT.sum(dim=1)
        assert self._forward is not None
        return self._forward(samples).logprobs_BT.sum(dim=1)

    @torch.no_grad()
    def _reference_totals(self, samples: Sequence[TokenSample]) -> Tensor:
        assert self._ref_forward is not None
        model: Any = self.model
        own = self._ref_forward is self._forward
        adapters_off: AbstractContextManager[Any] = model.disable_adapter() if own else nullcontext()
        with adapters_off:
            return self._ref_forward(samples).logprobs_BT.sum(dim=1)

    @torch.no_grad()
    def _baseline(self, batch: Sequence[Answered]) -> Tensor:
        """KTO's z0: each prompt with the answer of the next row; 0 for a batch of one."""
        if len(batch) < 2:
            return torch.zeros(())
        following = [*batch[1:], batch[0]]
        samples = [
            TokenSample(row.prompt_ids, other.response_ids, [1] * len(other.response_ids))
            for row, other in zip(batch, following, strict=True)
        ]
        policy, reference = [], []
        for run in micro_batches(samples, self._config.micro_batch_tokens, self._layout):
            part = samples[run.start : run.stop]
            policy.append(self._totals(part))
            reference.append(self._reference_totals(part))
        return kto_baseline(torch.cat(policy), torch.cat(reference))


def warm_start_config(train: TrainConfig, warm: WarmStartConfig) -> TrainConfig:
    """The train section with the warm start's rate, schedule and clipping."""
    own = {"lr": warm.lr, "schedule": warm.schedule, "warmup_steps": warm.warmup_steps, "min_lr_ratio": 0.0}
    return train.model_copy(update=own | {"max_grad_norm": warm.max_grad_norm})


def sft(
    model: nn.Module,
    batches: Iterable[Sequence[Example]],
    *,
    config: TrainConfig,
    total_steps: int,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train on batches of (prompt_ids, response_ids), one optimizer step each, in place.

    At most `total_steps` batches are taken. Returns `sft/loss` of the last step, `sft/steps`,
    `sft/tokens`, `sft/skipped_nonfinite` and `sft/seconds`. Of `config` the optimizer, schedule and
    memory options count; `epochs`, `mini_batches` and `old` belong to RL.
    """
    algorithm, start = resolve_offline(AlgorithmConfig(preset="sft")), time.perf_counter()
    trainer = OfflineTrainer(model, algorithm=algorithm, config=config, total_steps=total_steps, dtype=dtype)
    totals = {"sft/steps": 0.0, "sft/tokens": 0.0, "sft/skipped_nonfinite": 0.0}
    try:
        for _, batch in zip(range(total_steps), batches, strict=False):
            rows = [Answered(prompt, response) for prompt, response in batch if response]
            if not rows:
                log.warning("a supervised batch without response tokens was left out")
                continue
            step = {name.replace("offline/", "sft/"): value for name, value in trainer.step(rows).items()}
            totals["sft/steps"] += 1
            totals["sft/tokens"] += step["sft/tokens"]
            totals["sft/skipped_nonfinite"] += step["sft/skipped_nonfinite"]
            totals["sft/loss"] = step["sft/loss"]
            if progress is not None:
                shown = ("sft/loss", "sft/lr", "sft/grad_norm", "sft/tokens")
                progress(int(totals["sft/steps"]), {name: step[name] for name in shown})
    finally:
        trainer.close()
    return totals | {"sft/seconds": time.perf_counter() - start}

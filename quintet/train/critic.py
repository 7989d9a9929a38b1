"""PPO's critic: its values before an update, and its own optimizer step on every mini-batch of the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quintet.algorithms.value import explained_variance, value_loss
from quintet.train.batching import counts, micro_batches, right_padded, token_sample
from quintet.train.config import TrainConfig
from quintet.train.metrics import MetricSums
from quintet.train.optimizer import Optimizer
from quintet.train.packing import TokenSample
from quintet.train.value import ValueForward, ValueModel, after_last_token
from quintet.types import Experience


@dataclass(frozen=True)
class Critic:
    """The value model with its optimizer; `config` is the train section, whose `critic` it obeys."""

    model: ValueModel
    forward: ValueForward
    optimizer: Optimizer
    config: TrainConfig

    @classmethod
    def of(cls, model: ValueModel, config: TrainConfig, total_steps: int, dtype: torch.dtype) -> Critic:
        """`total_steps`: optimizer steps of the run, over which the schedule runs."""
        own = config.model_copy(update={"lr": config.critic.lr})
        return cls(model, ValueForward(model, config, dtype), Optimizer(model, own, total_steps), config)

    def warming_up(self, step: int) -> bool:
        """Whether controller step `step` (from 1) trains the critic alone."""
        return step <= self.config.critic.warmup_steps

    @torch.no_grad()
    def fill_values(self, samples: Sequence[Experience], *, bootstrap: bool) -> None:
        """Set `values` of every sample (0.0 on tokens that are not trained), and with `bootstrap` the value after the
        last token of truncated ones."""
        for e in samples:
            e.values = [0.0] * len(e.response_ids)
        trained = [e for e in samples if any(e.loss_mask)]
        for e, row in zip(trained, self._rows([token_sample(e) for e in trained]), strict=True):
            e.values = row
        cut = [e for e in samples if bootstrap and e.truncated and e.response_ids]
        after = self._rows([after_last_token(e.prompt_ids, e.response_ids) for e in cut])
        for e, row in zip(cut, after, strict=True):
            e.bootstrap_value = row[-1]

    def _rows(self, samples: Sequence[TokenSample]) -> list[list[float]]:
        out: list[list[float]] = []
        for run in micro_batches(samples, self.config.micro_batch_tokens, self.forward.layout):
            part = samples[run.start : run.stop]
            rows = self.forward(part).values_BT.tolist()
            out += [row[: len(s.response_ids)] for s, row in zip(part, rows, strict=True)]
        return out

    def describe(self, samples: Sequence[Experience]) -> dict[str, float]:
        """How the values before the update fit the returns; no explained variance where all returns are equal."""
        values, returns, mask = (
            right_padded(rows, max(len(e.response_ids) for e in samples), what)
            for rows, what in (
                ([e.values for e in samples], "values"),
                ([e.returns for e in samples], "returns"),
                ([e.loss_mask for e in samples], "loss_mask"),
            )
        )
        out = {
            "critic/value_mean": float(values[mask > 0].mean()),
            "critic/return_mean": float(returns[mask > 0].mean()),
        }
        if returns[mask > 0].unique().numel() > 1:
            out["critic/explained_variance"] = float(explained_variance(values, returns, mask))
        return out

    def step(self, samples: Sequence[Experience], sums: MetricSums) -> None:
        """One optimizer step on the token-mean of the clipped value loss."""
        step_counts, total = counts(samples), 0.0
        inputs = [token_sample(e) for e in samples]
        self.optimizer.zero_grad()
        for run in micro_batches(inputs, self.config.micro_batch_tokens, self.forward.layout):
            part = samples[run.start : run.stop]
            values_BT = self.forward(inputs[run.start : run.stop]).values_BT
            width, device = values_BT.shape[1], values_BT.device
            old_BT = right_padded([e.values for e in part], width, "values").to(device)
            returns_BT = right_padded([e.returns for e in part], width, "returns").to(device)
            mask_BT = right_padded([e.loss_mask for e in part], width, "loss_mask").to(device)
            loss_BT, clipped_BT = value_loss(values_BT, old_BT, returns_BT, clip=self.config.critic.clip)
            loss = (loss_BT * mask_BT).sum() / step_counts.tokens
            loss.backward()
            total += float(loss.detach())
            sums.add({"critic/clip_frac": ((clipped_BT * mask_BT).sum(), mask_BT.sum())})
        result = self.optimizer.step()
        sums.add_value("critic/loss", total)
        sums.add_value("critic/grad_norm", result.grad_norm)
        sums.add_value("critic/lr", result.lr)
        sums.add_value("critic/skipped_nonfinite", float(not result.applied))

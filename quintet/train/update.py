"""One controller step's gradient work: epochs x mini-batches x micro-batches over a batch of experiences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.algorithms.loss import TokenBatch, policy_objective
from quintet.algorithms.presets import Algorithm
from quintet.train.batching import counts, micro_batches, mini_batches, right_padded, token_sample, trainable
from quintet.train.checkpoint import random_states, restore_random_states
from quintet.train.config import TrainConfig
from quintet.train.critic import Critic
from quintet.train.forward import PolicyForward, ReferenceRows, TokenLogprobs
from quintet.train.metrics import MetricSums
from quintet.train.optimizer import Optimizer
from quintet.train.packing import TokenSample
from quintet.types import Experience, ExperienceBatch, Span, StepAbandoned, TrainMetrics, expand_versions

ReferenceRun = Callable[[Sequence[TokenSample]], ReferenceRows]


@dataclass(frozen=True)
class PolicyUpdate:
    """The policy, its optimizer and the algorithm that turns experiences into a loss.

    `stopping` is asked before every micro-batch up to the first optimizer step: until then the update can be given up
    without a trace; from then on it is finished.
    """

    forward: PolicyForward
    optimizer: Optimizer
    algorithm: Algorithm
    config: TrainConfig
    on_span: Callable[[Span], None] = lambda span: None
    critic: Critic | None = None
    stopping: Callable[[], bool] = lambda: False
    reference: ReferenceRun | None = None  # for a KL of whole distributions in the loss

    def run(self, batch: ExperienceBatch) -> TrainMetrics:
        """Update the weights: one optimizer step per mini-batch, none for a batch without a trainable sample.

        A critic takes as many steps of its own, on the same mini-batches; while it warms up the policy takes none.
        Raises StepAbandoned, weights and random states as before, when the run is to stop.
        """
        before = random_states()  # dropout has drawn from them by the time an update is given up
        try:
            return self._run(batch)
        except StepAbandoned:
            self.optimizer.zero_grad()
            restore_random_states(before)
            raise

    def _run(self, batch: ExperienceBatch) -> TrainMetrics:
        algorithm = self.algorithm.with_kl_coef(batch.kl_coef)
        start, sums = time.perf_counter(), MetricSums(self.on_span)
        samples = trainable(batch.experiences)
        tokens = sum(sum(e.loss_mask) for e in samples)
        values = {
            "actor/tokens": float(tokens),
            "actor/samples": float(len(samples)),
            "actor/untrainable_samples": float(len(batch.experiences) - len(samples)),
        }
        if not samples:
            return TrainMetrics(values | {"actor/no_trainable_sample": 1.0}, optimizer_steps=0)
        self._give_up_if_stopping()
        self.forward.training_mode()
        self.optimizer.zero_grad()  # an update that raised half-way may have left a part of its gradient
        taken = skipped = rows = 0
        frozen = self.critic is not None and self.critic.warming_up(batch.step)
        if self.critic is not None:
            values |= self.critic.describe(samples) | {"critic/warming_up": float(frozen)}
        for epoch in range(self.config.epochs):
            for mini_batch in mini_batches(samples, self.config.mini_batches):
                if self.critic is not None:
                    with sums.timed("critic", self.forward.device):
                        self.critic.step(mini_batch, sums)
                if frozen:
                    continue
                first = taken + skipped == 0 and self.critic is None
                rows += self._gradient(
                    algorithm,
                    mini_batch,
                    batch.version,
                    sums,
                    first_epoch=epoch == 0,
                    untouched=taken == 0,
                    may_give_up=first,
                )
                with sums.timed("optimizer", self.forward.device):
                    result = self.optimizer.step()
                taken, skipped = taken + result.applied, skipped + (not result.applied)
                sums.add_value("actor/grad_norm", result.grad_norm)
                sums.add_value("actor/lr", result.lr)
        values["actor/skipped_nonfinite"] = float(skipped)
        values["actor/tokens_per_s"] = rows / (time.perf_counter() - start)
        return TrainMetrics(sums.values() | values, optimizer_steps=taken)

    def _give_up_if_stopping(self) -> None:
        if self.stopping():
            raise StepAbandoned

    def _gradient(
        self,
        algorithm: Algorithm,
        samples: Sequence[Experience],
        version: int,
        sums: MetricSums,
        *,
        first_epoch: bool,
        untouched: bool,
        may_give_up: bool,
    ) -> int:
        """Accumulate the gradient of one mini-batch; returns the rows that went through the model."""
        step_counts, step_loss, rows = counts(samples), 0.0, 0
        samples = self._contributing(samples, sums)
        inputs = [token_sample(e) for e in samples]
        for run in micro_batches(inputs, self.config.micro_batch_tokens, self.forward.layout):
            with sums.timed("forward", self.forward.device):
                part = inputs[run.start : run.stop]
                out = self.forward(part, None if self.reference is None else self.reference(part))
                batch = self._token_batch(samples[run.start : run.stop], out, version)
                loss, stats = policy_objective(algorithm, batch, step_counts)
            with sums.timed("backward", self.forward.device):
                loss.backward()
            if may_give_up:
                self._give_up_if_stopping()
            step_loss += float(loss.detach())
            rows += out.rows
            sums.add(stats)
            trainers = batch.old_logprobs if self.config.old == "trainer" else batch.logprobs.detach()
            if trainers is not None and (untouched or (first_epoch and self.config.old == "trainer")):
                sums.add(mismatch(trainers, batch))
        sums.add_value("actor/loss", step_loss)
        return rows

    def _contributing(self, samples: Sequence[Experience], sums: MetricSums) -> Sequence[Experience]:
        """The samples that can add to the gradient; one where none can, so that the optimizer sees a gradient of 0."""
        kept = samples
        if self.config.skip_zero_advantage and self.algorithm.skips_zero_advantage:
            kept = [e for e in samples if e.advantages is None or any(e.advantages)] or samples[:1]
        sums.add_value("actor/skipped_frac", 1.0 - len(kept) / len(samples))
        return kept

    def _token_batch(self, samples: Sequence[Experience], out: TokenLogprobs, version: int) -> TokenBatch:
        """Experiences beside their log-probabilities, right-padded [B, T] float32 on the model's device."""
        width, device = out.logprobs_BT.shape[1], self.forward.device

        def column(rows: Sequence[Sequence[float] | None], what: str) -> Tensor:
            return right_padded(rows, width, what).to(device)

        old = {
            "self": None,
            "trainer": lambda: column([e.proximal_logprobs for e in samples], "proximal_logprobs"),
            "sampler": lambda: column([e.logprobs for e in samples], "logprobs"),
        }[self.config.old]
        entropy = out.entropy_BT if self.algorithm.entropy_coef != 0.0 else out.entropy_BT.detach()
        needs_ref = self.algorithm.needs_ref and not self.algorithm.needs_full_kl
        return TokenBatch(
            logprobs=out.logprobs_BT,
            old_logprobs=None if old is None else old(),
            sampler_logprobs=column([e.logprobs for e in samples], "logprobs"),
            advantages=column([e.advantages for e in samples], "advantages"),
            mask=column([e.loss_mask for e in samples], "loss_mask"),
            ref_logprobs=column([e.ref_logprobs for e in samples], "ref_logprobs") if needs_ref else None,
            entropy=entropy,
            versions_match=column([_matches(e, version) for e in samples], "weight_versions"),
            rewards=torch.tensor([e.reward for e in samples], dtype=torch.float32, device=device),
            full_kl=out.kl_BT,
        )


def mismatch(trainer_logprobs_BT: Tensor, batch: TokenBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """|engine - trainer| of the loss tokens that the current weights sampled, before they change: mean and maximum."""
    assert batch.versions_match is not None
    chosen = (batch.mask * batch.versions_match).bool() & ~batch.sampler_logprobs.isnan()
    gap_N = (trainer_logprobs_BT - batch.sampler_logprobs).abs()[chosen]
    count = torch.tensor(float(gap_N.numel()))
    largest = gap_N.max() if gap_N.numel() else torch.zeros(())
    return {"mismatch/mean_abs_logprob": (gap_N.sum(), count), "mismatch/max_abs_logprob": (largest, count)}


def _matches(experience: Experience, version: int) -> list[float]:
    """1.0 for every token sampled with `version`."""
    versions = expand_versions(experience.weight_versions)
    return [float(v == version) for v in versions or [experience.weight_version] * len(experience.response_ids)]

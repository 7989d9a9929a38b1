"""The training loop, top to bottom: prompts → rollouts → scores → advantages → update → version + 1 → new weights.

Stands for: a single controller such as verl's RayPPOTrainer. Grown-up version: quintet/controller/controller.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .algorithms import categorical_kl, compute_grpo_advantage
from .buffer import Experience, ExperienceBuffer
from .clock import FakeClock
from .model import TinyPolicy
from .reward import RewardService, Score
from .rollout import Rollout, RolloutWorker, StaleRolloutError
from .trainer import TrainWorker

EVAL_SEED = 20_000  # the same random numbers before and after: what differs is the weights
DIGIT_PROMPTS = [(d,) for d in range(9)]

Prepare = Callable[[TinyPolicy, list[Experience]], None]


def make_experience(rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[Experience]:
    return [
        Experience(
            prompt_ids=r.prompt,
            response_ids=r.response,
            logprobs=r.logprobs,
            reward=score.reward,
            advantage=0.0,
            weight_version=r.weight_version,
            metadata={"rule": score.rule, "model": score.model, "finish_reason": r.finish_reason},
            loss_mask=r.loss_mask,
            group_id=r.group_id,
        )
        for r, score in zip(rollouts, scores, strict=True)
    ]


@dataclass
class Controller:
    worker: RolloutWorker
    reward: RewardService
    trainer: TrainWorker
    prompts: Sequence[tuple[int, ...]] = field(default_factory=lambda: list(DIGIT_PROMPTS))
    prompts_per_step: int = 8
    seed: int = 0
    strict: bool = True  # False: a stale rollout is discarded and counted instead of raising
    max_staleness: int = 0  # in versions; 0 is on-policy
    scale_by_std: bool = True
    prepare: Prepare | None = None  # what a batch needs just before it is trained on (async_rollout.py)
    version: int = 0
    stale: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffer = ExperienceBuffer(self.max_staleness)
        self.sync_weights()

    def step(self) -> dict[str, float]:
        rollouts = self.worker.generate(self.sample_prompts(self.version), weight_version=self.version)
        return self.learn(rollouts)

    def learn(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """From rollouts to the next weight version; returns the step's metrics."""
        rollouts = self.check_versions(rollouts)
        batch = make_experience(rollouts, self.reward.score(rollouts))
        self.compute_advantage(batch)
        self.buffer.add(batch)
        batch = self.buffer.take(len(batch), self.version)
        if self.prepare is not None:
            self.prepare(self.trainer.policy, batch)
        metrics = self.trainer.update(batch)
        metrics["reward"] = sum(e.reward for e in batch) / len(batch)
        metrics["length"] = sum(len(e.response_ids) for e in batch) / len(batch)
        metrics["staleness"] = float(self.version - min(e.weight_version for e in batch))
        self.version += 1
        self.sync_weights()
        metrics["version"] = float(self.version)
        self.history.append(metrics)
        return metrics

    def sample_prompts(self, step: int) -> list[tuple[int, ...]]:
        rng = random.Random(f"prompts/{self.seed}/{step}")
        return rng.choices(self.prompts, k=self.prompts_per_step)

    def check_versions(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Keeps the rollouts of at most `max_staleness` versions ago; the others raise, or are counted."""
        fresh = [r for r in rollouts if 0 <= self.version - r.weight_version <= self.max_staleness]
        if len(fresh) < len(rollouts) and self.strict:
            versions = sorted({r.weight_version for r in rollouts})
            raise StaleRolloutError(f"rollouts of version {versions} came while version {self.version} is current")
        self.stale += len(rollouts) - len(fresh)
        return fresh

    def compute_advantage(self, batch: Sequence[Experience]) -> None:
        rewards, groups = [e.reward for e in batch], [e.group_id for e in batch]
        for e, advantage in zip(batch, compute_grpo_advantage(rewards, groups, self.scale_by_std), strict=True):
            e.advantage = advantage

    def sync_weights(self) -> None:
        """Publishes the trainer's weights as the current version: whole or not at all."""
        self.worker.update_weights(self.trainer.get_weights(), self.version)

    def evaluate(self, prompts: Sequence[tuple[int, ...]] | None = None, samples: int = 16) -> dict[str, float]:
        """Means over fresh samples of the current weights; the random numbers are the same at every call."""
        worker = self.worker.evaluator(self.trainer.policy, EVAL_SEED, samples)
        rollouts = worker.generate(self.prompts if prompts is None else prompts)
        scores = replace(self.reward, clock=FakeClock()).score(rollouts)
        means = {name: sum(getattr(s, name) for s in scores) / len(scores) for name in Score._fields}
        means["length"] = sum(len(r.response) for r in rollouts) / len(rollouts)
        visits = Counter(t.prev for e in make_experience(rollouts, scores) for t in e.own_tokens())
        policy, reference = self.trainer.policy, self.trainer.reference
        kl_sum = sum(n * categorical_kl(policy.logprobs(s), reference.logprobs(s)) for s, n in visits.items())
        return {**means, "kl": kl_sum / visits.total()}

"""The train worker: optimizer, schedule, batching, old policy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

KernelChoice = Literal["auto", "native", "torch"]


class CriticConfig(BaseModel):
    """The value model of a preset with a critic (ppo): a copy of the policy's body with a head of one number, trained
    in full (under LoRA too). Its other options are the policy's; gamma and lam belong to `algorithm.advantage`."""

    model_config = ConfigDict(extra="forbid")

    lr: float = Field(1e-5, gt=0.0)
    warmup_steps: int = Field(0, ge=0, description="controller steps at the start that train only the critic")
    clip: float | None = Field(
        0.2, gt=0.0, description="a value counts at most this far from the one before the update; null: no clipping"
    )


class TrainConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lr: float = Field(1e-6, ge=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0, description="decay ends at lr times this (linear, cosine)")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0, description="of matrices; norms and biases do not decay")
    max_grad_norm: float = Field(1.0, ge=0.0, description="0: no clipping")
    epochs: int = Field(1, gt=0, description="passes over a step's batch")
    mini_batches: int = Field(1, gt=0, description="optimizer steps per epoch; must divide the groups of a step")
    micro_batch_tokens: int = Field(8192, gt=0, description="tokens per forward at most (one sample may exceed it)")
    old: Literal["self", "trainer", "sampler"] = Field(
        "self",
        description="the old policy of the ratio. self: the current one, detached (one update per batch); "
        "trainer: recomputed before the first update; sampler: the engine's own log-probabilities",
    )
    skip_zero_advantage: bool = Field(
        True,
        description="samples whose advantages are all 0 go through no forward pass where they add nothing to the "
        "gradient (exact: the denominators count them); metrics of the update then cover the others",
    )
    shared_prompt: bool = Field(True, description="compute a prompt once for its samples in a micro-batch (exact)")
    head_chunk_tokens: int = Field(1024, gt=0, description="rows of the language-model head computed at once")
    activation_checkpointing: bool = False
    kernels: KernelChoice = Field(
        "auto",
        description="what a Llama-like model on a CPU does between its matrix products. native: C++ compiled for this "
        "machine, an error where it cannot run; torch: plain torch; auto: native where it can run. Other models and "
        "devices, and rollout.numerics: reproducible, take neither",
    )
    critic: CriticConfig = Field(default_factory=CriticConfig)

    def conflict(self) -> str | None:
        """The first pair of options that contradict each other, with the mend; None when there is none."""
        if self.old == "self" and self.epochs * self.mini_batches > 1:
            return (
                f"train.old: self allows one update per batch, but epochs x mini_batches = "
                f"{self.epochs} x {self.mini_batches}; use old: trainer (or sampler)"
            )
        if self.schedule == "constant" and self.min_lr_ratio > 0.0:
            return "train.min_lr_ratio has no effect with schedule: constant; use linear or cosine, or remove it"
        return None

    @model_validator(mode="after")
    def _refuse_conflict(self) -> Self:
        if (message := self.conflict()) is not None:
            raise ValueError(message)
        return self


class OfflineConfig(BaseModel):
    """The loop of offline presets (dpo, kto, reward_model, sft ...). `steps` are its optimizer steps; optimizer,
    schedule and memory options are those of `train`."""

    model_config = ConfigDict(extra="forbid")

    batch_size: int = Field(32, gt=0, description="rows (pairs, or single answers) in one optimizer step")
    max_response_tokens: int = Field(
        1024, gt=0, description="a row with a longer answer, its end token included, is left out"
    )
    train_on: Literal["last", "all"] = Field(
        "last", description="sft on messages: the last assistant message, or all of them (in one sequence)"
    )


class WarmStartConfig(BaseModel):
    """A supervised stage before RL (`steps` 0: none), on the training prompts and their reference answers. Before an
    offline preset: on the chosen (desirable) answers."""

    model_config = ConfigDict(extra="forbid")

    steps: int = Field(0, ge=0, description="optimizer steps at most")
    until_loss: float | None = Field(
        None, gt=0.0, description="end earlier, once the mean loss of the last 5 batches is this low; null: all `steps`"
    )
    batch_size: int = Field(64, gt=0)
    lr: float = Field(1e-3, gt=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    max_grad_norm: float = Field(1.0, ge=0.0)


class CheckpointConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    every: int = Field(0, ge=0, description="controller steps between checkpoints; 0: only at the end")
    keep_last: int = Field(2, gt=0, description="newest checkpoints kept")
    keep_best: bool = Field(False, description="also keep the one with the highest eval/accuracy (see eval.every)")
    keep_trajectories_steps: int | None = Field(
        None,
        ge=0,
        description="with a checkpoint, delete journaled trajectories older than this many steps and than every "
        "checkpoint a resume may need; null: keep all, so that any step can be replayed",
    )

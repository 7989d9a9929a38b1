"""What a run reports, and where to."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LogConfig(BaseModel):
    """`metrics.jsonl`, `summary.json` and `report.html` are always written; `trackers` come on top."""

    model_config = ConfigDict(extra="forbid")

    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        default_factory=list, description="tensorboard writes into the run folder; wandb is the extra quintet[wandb]"
    )
    wandb_project: str = Field("quintet", description="used by the wandb tracker only")
    console: Literal["auto", "live", "plain", "quiet"] = Field(
        "auto", description="auto: live view on a terminal, else one plain line per step; quiet: errors only"
    )
    samples_per_step: int = Field(
        8, ge=0, description="rollouts of each step kept as readable samples in rollouts/ and in the report"
    )

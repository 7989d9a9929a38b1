"""A preset and the cells of its row that a recipe overrides."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class AlgorithmConfig(BaseModel):
    """A cell is `name`, or `{name: ..., param: value}`; without `name` the preset's function keeps its place
    and only the given parameters change. `none` empties a cell. A parameter that the resulting function does not
    have, or that does nothing there, is an error."""

    model_config = ConfigDict(extra="forbid")

    preset: str = Field(
        "grpo", description="a name of `quintet algorithms`, an installed package's, or package.module:ROW"
    )
    max_staleness: int = Field(
        0, ge=0, description="eta: how many versions old a token may be when it is trained; 0 is on-policy"
    )
    advantage: dict[str, Any] | str | None = Field(None, description="override: how rewards become advantages")
    policy_loss: dict[str, Any] | str | None = Field(None, description="override: the loss of one token")
    aggregation: dict[str, Any] | str | None = Field(None, description="override: how token losses become one number")
    kl: dict[str, Any] | str | None = Field(
        None, description="override: penalty towards the reference; none: no penalty"
    )
    correction: dict[str, Any] | str | None = Field(
        None, description="override: weights for old policy against sampler; none: no correction"
    )
    filters: list[dict[str, Any] | str] | None = Field(
        None, description="override: the whole list of sample and group filters; []: no filter"
    )
    objective: dict[str, Any] | str | None = Field(
        None, description="override, offline presets (dpo, reward_model, sft ...) only: the loss of given answers"
    )
    entropy_coef: float = Field(0.0, description="entropy bonus: this times the mean token entropy leaves the loss")

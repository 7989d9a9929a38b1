"""Which reward functions, with what weights, and what happens when one fails."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class RewardFunctionConfig(BaseModel):
    """`fn`: a built-in (`number`, `exact`, `format`, ...), `model` (a trained reward model, `args: {path: FOLDER}`),
    `package.module:function` or `path/to/file.py:function` in TRL's or verl's signature."""

    model_config = ConfigDict(extra="forbid")

    fn: str
    name: str | None = Field(None, description="its name in metrics; null: the function's own")
    weight: float = Field(1.0, allow_inf_nan=False)
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of every call")
    truncated: Literal["grade", "zero"] = Field(
        "grade", description="a response cut by max_tokens: graded like any other, or 0 without a call"
    )


class RewardConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    functions: list[RewardFunctionConfig] = Field(
        default_factory=lambda: [RewardFunctionConfig.model_validate({"fn": "number"})], min_length=1
    )
    workers: int = Field(2, ge=0, description="processes for user functions; 0: in this process, without a hard limit")
    timeout_s: float = Field(
        5.0,
        gt=0,
        description="hard limit per sample; the worker is killed and replaced. A TRL-style function is called once "
        "per group, with this times the number of samples, and once more sample by sample if that is exceeded",
    )
    on_failure: Literal["exclude", "stop"] = Field(
        "exclude", description="exclude the sample and count it, or stop the run with a named error"
    )
    max_failure_frac: float = Field(
        0.5, gt=0.0, le=1.0, description="stop when more than this share of a step's samples failed"
    )

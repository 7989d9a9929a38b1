"""Which reward functions, with what weights, and what happens when one fails."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Normalize = Literal["none", "range", "sigmoid", "group_std", "group_rank"]
_OF_THE_SERVICE = ("functions", "workers", "timeout_s")
Role = Literal["rule", "model", "other"]


class GateConfig(BaseModel):
    """The function counts only where another one's value is at least `at_least`; elsewhere its term is 0."""

    model_config = ConfigDict(extra="forbid")

    part: str = Field(description="name of the other function, which has no gate of its own")
    at_least: float = Field(1.0, allow_inf_nan=False)
    closed: Literal["watch", "skip"] = Field(
        "watch", description="where the gate is closed: called all the same, for the metrics, or not called"
    )


class RewardFunctionConfig(BaseModel):
    """`fn`: a built-in (`number`, `exact`, `format`, ...), `code` (programs against tests in a sandbox, docs/code.md),
    `model` (a trained reward model, `args: {path: FOLDER}`),
    `remote_model` and `judge` (behind HTTP, `args: {urls: [...], model: NAME}`), or
    `package.module:function` or `path/to/file.py:function` in TRL's or verl's signature."""

    model_config = ConfigDict(extra="forbid")

    fn: str
    name: str | None = Field(None, description="its name in metrics; null: the function's own")
    weight: float = Field(1.0, allow_inf_nan=False, description="0: watched, in the metrics and not in the reward")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of every call")
    truncated: Literal["grade", "zero"] = Field(
        "grade", description="a response cut by max_tokens: graded like any other, or 0 without a call"
    )
    task_types: list[str] | None = Field(
        None, min_length=1, description="prompts of other task types are none of its business; null: all are"
    )
    normalize: Normalize = Field(
        "none",
        description="before the weight: range (to 0..1), sigmoid, or the standard score or rank within the group",
    )
    range: tuple[float, float] | None = Field(None, description="with normalize range: what becomes 0 and what 1")
    gate: GateConfig | None = None
    role: Role | None = Field(
        None, description="for the hacking monitor: a verifiable rule, a learned model, or other; null: by its kind"
    )

    @property
    def part_name(self) -> str:
        """What the function is called in metrics, parts and gates."""
        return self.name or self.fn.rpartition(":")[2]

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if (self.range is not None) != (self.normalize == "range"):
            raise ValueError("normalize: range needs range: [low, high], and no other normalize uses it")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range {list(self.range)}: the first number must be below the second")
        return self


class RewardConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    url: str | list[str] | None = Field(
        None,
        min_length=1,
        description="a reward service elsewhere (`quintet serve reward`), or several equal ones; null: in this process",
    )
    api_key_env: str | None = Field(None, description="with url: the environment variable that holds its key")

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

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if self.url is None and self.api_key_env is not None:
            raise ValueError("api_key_env goes with url")
        fields = type(self).model_fields
        defaults = {name: fields[name].get_default(call_default_factory=True) for name in _OF_THE_SERVICE}
        elsewhere = [name for name, default in defaults.items() if getattr(self, name) != default]
        if self.url is not None and elsewhere:
            raise ValueError(f"with url, {elsewhere[0]} has no effect here: it belongs to the recipe of the service")
        return self

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if all(f.weight == 0.0 for f in self.functions):
            raise ValueError("every weight is 0: there would be no reward to learn from")
        parts = {f.part_name: f for f in self.functions}
        for function in self.functions:
            gate = function.gate
            if gate is None:
                continue
            other = parts.get(gate.part)
            if other is None or other is function:
                others = ", ".join(name for name in parts if name != function.part_name) or "none"
                raise ValueError(f"the gate of `{function.part_name}` names `{gate.part}`; other functions: {others}")
            if other.gate is not None:
                raise ValueError(f"the gate of `{function.part_name}` names `{gate.part}`, which has a gate itself")
        return self

"""One YAML into the tree of component configs: loading, overriding, refusing, printing, comparing.

Each component's options live beside the component (`train/config.py`, `rollout/config.py` ...); this file
only joins them. Everything here is torch-free: a wrong recipe is refused before anything heavy loads.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from quintet.algorithms.config import AlgorithmConfig
from quintet.checks import find_problems
from quintet.data.config import DataConfig
from quintet.files import write_whole
from quintet.models.config import ModelConfig
from quintet.observe.config import LogConfig
from quintet.recipe import Recipe, nearest, read_recipe, with_overrides
from quintet.reward.config import RewardConfig
from quintet.rollout.config import EnvironmentConfig, RolloutConfig
from quintet.train.config import CheckpointConfig, OfflineConfig, TrainConfig, WarmStartConfig
from quintet.types import QuintetError


class EvalConfig(BaseModel):
    """Evaluation on held-out prompts. It always happens before and after training."""

    model_config = ConfigDict(extra="forbid")

    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before and after")
    samples: int = Field(
        0, ge=0, description="also N samples a prompt at rollout.temperature (mean, pass@N); 0: greedy only"
    )
    max_prompts: int | None = Field(None, gt=0, description="use only the first N held-out prompts; null: all")
    max_tokens: int | None = Field(None, gt=0, description="new tokens per answer; null: rollout.max_tokens")


class ClusterConfig(BaseModel):
    """Where the five modules live."""

    model_config = ConfigDict(extra="forbid")

    backend: Literal["local"] = Field("local", description="local: all five modules in this process")
    threads: int | None = Field(
        None, gt=0, description="CPU threads per tensor operation; null: torch's choice (1 is quicker for tiny models)"
    )


class RunConfig(BaseModel):
    """A whole run. Every default is printed by `quintet config --defaults`."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("run", description="the default run folder is runs/NAME; if absent, the recipe file's own name")
    steps: int = Field(30, ge=0, description="controller steps; each publishes one weight version")
    seed: int = Field(0, ge=0, description="keys every random draw of the run")
    model: ModelConfig = Field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)
    offline: OfflineConfig = Field(default_factory=OfflineConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


ConfigSource = RunConfig | Mapping[str, Any] | str | Path


def load_config(source: ConfigSource, overrides: Iterable[str] = (), *, training: bool = True) -> RunConfig:
    """The checked tree from a YAML file, a mapping or a tree; `overrides` are `a.b=c` texts, applied in order.

    `training` False leaves out what only RL cares about (evaluation, generation and SFT may use such recipes).
    Raises QuintetError for anything wrong, naming file and line where there is one.
    """
    recipe = with_overrides(_as_recipe(source), overrides)
    _refuse_unknown_keys(recipe)
    try:
        config = RunConfig.model_validate(recipe.data)
    except ValidationError as error:
        raise QuintetError("\n".join(_explain(recipe, error))) from None
    check(config, recipe, training=training)
    return config


def _as_recipe(source: ConfigSource) -> Recipe:
    if isinstance(source, RunConfig):
        return Recipe(source.model_dump(exclude_unset=True))
    if isinstance(source, Mapping):
        return Recipe(dict(source))
    recipe = read_recipe(source)
    recipe.data.setdefault("name", Path(source).stem)
    return recipe


# -- refusing ----------------------------------------------------------------------------------------


def _submodel(annotation: Any) -> type[BaseModel] | None:
    """The config class in an annotation such as `LoraConfig | None`; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next((m for a in get_args(annotation) if (m := _submodel(a)) is not None), None)
    return None


def _item_model(annotation: Any) -> type[BaseModel] | None:
    """The config class of a list's items, e.g. of `reward.functions`."""
    return _submodel(get_args(annotation)[0]) if get_origin(annotation) is list else None


def walk(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf option as (dotted key, field), in the order of the tree."""
    for name, info in model.model_fields.items():
        sub = _submodel(info.annotation)
        if sub is None:
            yield f"{prefix}{name}", info
        else:
            yield from walk(sub, f"{prefix}{name}.")


def _refuse_unknown_keys(recipe: Recipe) -> None:
    problems = list(_unknown_keys(recipe, RunConfig, recipe.data, ()))
    if problems:
        raise QuintetError("\n".join(problems[:3]))


def _unknown_keys(
    recipe: Recipe, model: type[BaseModel], data: Mapping[str, Any], path: tuple[str | int, ...]
) -> Iterator[str]:
    for key, value in data.items():
        here = (*path, key)
        info = model.model_fields.get(key)
        if info is None:
            dotted = ".".join(map(str, here))
            yield f"{recipe.locate(here)}: unknown key '{dotted}'{_hint(key, model, path)}"
            continue
        sub, item = _submodel(info.annotation), _item_model(info.annotation)
        if sub is not None and isinstance(value, Mapping):
            yield from _unknown_keys(recipe, sub, value, here)
        elif item is not None and isinstance(value, list):
            for i, row in enumerate(value):
                if isinstance(row, Mapping):
                    yield from _unknown_keys(recipe, item, row, (*here, i))
        elif isinstance(value, bool) and info.annotation in (int, float):
            yield f"{recipe.locate(here)}: '{'.'.join(map(str, here))}' wants a number, not {str(value).lower()}"


def _hint(key: str, model: type[BaseModel], path: Sequence[str | int]) -> str:
    """`; did you mean ...?` from the same section first, then from the whole tree, else the valid names."""
    prefix = "".join(f"{part}." for part in path)
    same = nearest(key, model.model_fields)
    if same is not None:
        return f"; did you mean '{prefix}{same}'?"
    leaves = {dotted.rpartition(".")[2]: dotted for dotted, _ in walk()}
    other = nearest(key, leaves)
    if other is not None:
        return f"; did you mean '{leaves[other]}'?"
    return f"; valid here: {', '.join(model.model_fields)}"


def _explain(recipe: Recipe, error: ValidationError) -> list[str]:
    lines: dict[str, str] = {}  # one line per key: a union reports each of its branches
    for item in error.errors(include_url=False):
        path = _known_part(recipe.data, item["loc"])
        key, where = ".".join(map(str, path)), recipe.locate(path)
        if item["type"] == "value_error":  # a section's own complaint says what it is about
            lines[key] = f"{where}: {item['ctx']['error']}"
            continue
        shown = json.dumps(item["input"], ensure_ascii=False, default=str)
        text = f"{where}: '{key}' is {shown[:60]}: {_expectation(item)}"
        lines[key] = f"{lines[key]}, or {_expectation(item)}" if key in lines else text
    return list(lines.values())[:3]


def _expectation(item: Mapping[str, Any]) -> str:
    if item["type"] == "missing":
        return f"it needs the key '{item['loc'][-1]}'"
    if item["type"] in ("model_type", "model_attributes_type"):
        return "expected a section with keys of its own"
    text = str(item["msg"])
    return text[0].lower() + text[1:]


def _known_part(data: Any, loc: Sequence[str | int]) -> tuple[str | int, ...]:
    """The part of pydantic's location that is in the recipe (the rest names branches of a union)."""
    path: list[str | int] = []
    for part in loc:
        inside = part in data if isinstance(data, Mapping) else isinstance(data, list) and part in range(len(data))
        if not inside:
            break
        path.append(part)
        data = data[part]
    return tuple(path)


def check(config: RunConfig, recipe: Recipe | None = None, *, training: bool = True) -> None:
    """Refuse options that contradict each other or would do nothing. Raises QuintetError with the first one found.

    `recipe` gives the file and line of the option complained about.
    """
    problem = next(find_problems(config, training=training), None)
    if problem is None:
        return
    where = (recipe or Recipe({})).locate(tuple(problem.key.split(".")))
    raise QuintetError(f"{problem.key}: {problem.message}" if where == "config" else f"{where}: {problem.message}")


# -- the run folder ----------------------------------------------------------------------------------


def run_folder(config: RunConfig, out: str | Path | None = None) -> Path:
    """Where the run lives: `out`, or `runs/<name>`."""
    return Path(out) if out is not None else Path("runs") / config.name


def require_writable(folder: Path) -> None:
    """Make the folder and try to write in it. Raises QuintetError when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise QuintetError(f"cannot write the run folder {folder}: {reason}; choose another with --out") from None


# -- printing and comparing --------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Keeps lists on one line and mappings in their order."""


_Dumper.add_representer(list, lambda d, v: d.represent_sequence("tag:yaml.org,2002:seq", v, flow_style=_is_flat(v)))


def _is_flat(values: Sequence[Any]) -> bool:
    return not any(isinstance(v, dict | list) for v in values)


def to_yaml(config: RunConfig) -> str:
    """The fully resolved tree; `load_config` of it gives an equal tree."""
    return _dump(config.model_dump(mode="json"))


def _dump(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def save(config: RunConfig, path: str | Path) -> None:
    """Write the resolved tree, whole or not at all."""
    write_whole(path, to_yaml(config))


def defaults_yaml() -> str:
    """Every option with its default; descriptions as comments."""
    return "\n".join(_default_lines(RunConfig, "")) + "\n"


def _default_lines(model: type[BaseModel], indent: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        sub = _submodel(info.annotation)
        default = info.get_default(call_default_factory=True)
        note = f"  # {info.description}" if info.description else ""
        if sub is None or default is None:
            plain = (
                [d.model_dump(mode="json") if isinstance(d, BaseModel) else d for d in default]
                if isinstance(default, list | tuple)
                else default
            )
            yield f"{indent}{name}: {_inline(plain)}{note}"
        else:
            yield ""
            yield from (f"{indent}# {line}" for line in _section_comment(sub))
            yield f"{indent}{name}:"
        if sub is not None and default is None:
            yield from (f"{indent}# {line}".rstrip() for line in [f"  {name}:", *_default_lines(sub, "    ")] if line)
        elif sub is not None:
            yield from _default_lines(sub, indent + "  ")


def _inline(value: Any) -> str:
    return (
        yaml.dump(
            value, Dumper=yaml.SafeDumper, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6
        )
        .removesuffix("...\n")
        .strip()
    )


def _section_comment(model: type[BaseModel]) -> list[str]:
    doc = model.__doc__ or ""
    return [line.strip() for line in doc.strip().splitlines() if line.strip()]


def digest(config: RunConfig) -> str:
    """sha256 of the resolved tree in canonical JSON: equal trees, equal digests."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def diff(a: RunConfig, b: RunConfig) -> list[str]:
    """Dotted keys in which two trees differ, in the order of the tree."""
    return list(_differences(a.model_dump(mode="json"), b.model_dump(mode="json"), ""))


def _differences(a: Any, b: Any, prefix: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            if key not in a or key not in b:
                yield f"{prefix}{key}"
            else:
                yield from _differences(a[key], b[key], f"{prefix}{key}.")
    elif a != b:
        yield prefix.rstrip(".")

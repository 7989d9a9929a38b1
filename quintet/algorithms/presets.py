"""The table of presets and how a recipe's overrides are laid over a row. Torch-free.

A row is advantage x policy loss x aggregation x KL x correction x filters.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from quintet.algorithms.cells import COLUMNS, CellSpec, Param, Trait
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.plugins import import_named, load_custom
from quintet.types import QuintetError

CUSTOM_COLUMNS = ("advantage", "policy_loss")


@dataclass(frozen=True)
class Cell:
    """A function by name with all its parameters. `package.module:function` is the user's own."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def custom(self) -> bool:
        return ":" in self.name


@dataclass(frozen=True)
class Row:
    """A preset: cells with the parameters in which they differ from the cell's own defaults."""

    doc: str
    source: str
    advantage: Cell
    policy_loss: Cell
    aggregation: Cell
    kl: Cell | None = None
    correction: Cell | None = None
    filters: tuple[Cell, ...] = ()


@dataclass(frozen=True)
class OfflineRow:
    """A preset that trains on given answers instead of samples: one objective."""

    doc: str
    source: str
    objective: Cell


@dataclass(frozen=True)
class Algorithm:
    """A resolved row: every cell with every parameter filled in."""

    preset: str
    advantage: Cell
    policy_loss: Cell
    aggregation: Cell
    kl: Cell | None
    correction: Cell | None
    filters: tuple[Cell, ...]
    entropy_coef: float
    max_staleness: int

    @property
    def needs_ref(self) -> bool:
        """A frozen reference policy is compared with."""
        return self.kl is not None

    @property
    def needs_full_kl(self) -> bool:
        """The KL is that of whole distributions: `TokenBatch.full_kl`, or in the reward `Experience.full_kl`."""
        return self.kl is not None and self.kl.name == "full"

    @property
    def kl_in_loss(self) -> bool:
        return self.kl is not None and self.kl.params["placement"] == "loss"

    def with_kl_coef(self, coef: float | None) -> Algorithm:
        """The row at a coefficient that an adaptive KL has reached; None: as it is."""
        if coef is None or self.kl is None:
            return self
        return replace(self, kl=Cell(self.kl.name, {**self.kl.params, "coef": coef}))

    @property
    def group_relative(self) -> bool:
        """A group of one would teach nothing. A user's own estimator is taken not to be."""
        return Trait.GROUP_RELATIVE in _traits("advantage", self.advantage)

    @property
    def needs_entropy(self) -> bool:
        """`TokenBatch.entropy` must be filled."""
        return self.entropy_coef != 0.0 or self.policy_loss.params.get("entropy_keep", 1.0) < 1.0

    @property
    def needs_proximal(self) -> bool:
        """Old log-probabilities must be there before the advantages (`train.old: trainer`)."""
        return Trait.NEEDS_PROXIMAL in _traits("correction", self.correction)

    @property
    def skips_zero_advantage(self) -> bool:
        """A sample whose advantages are all 0 adds nothing to the gradient, and changes no other sample's: every policy
        loss is proportional to the advantage, and no other term acts. A user's own loss is taken not to be."""
        kl_acts = self.kl is not None and self.kl_in_loss and self.kl.params["coef"] > 0
        return not (kl_acts or self.needs_entropy or self.policy_loss.custom)

    @property
    def needs_values(self) -> bool:
        """A critic is trained beside the policy, and its values are there before the advantages."""
        return Trait.NEEDS_VALUES in _traits("advantage", self.advantage)

    @property
    def needs_greedy(self) -> bool:
        """Each group has a greedy answer beside its samples, whose reward is their baseline."""
        return Trait.NEEDS_GREEDY in _traits("advantage", self.advantage)

    def rollouts_per_group(self, group_size: int) -> int:
        """What is generated, scored and journaled for each prompt drawing."""
        return group_size + self.needs_greedy

    @property
    def needs_bootstrap(self) -> bool:
        """The critic's value after the last token of a truncated response is wanted too."""
        return self.needs_values and bool(self.advantage.params["bootstrap"])

    def bound_to(self, max_tokens: int) -> Algorithm:
        """Dr. GRPO's constant length, where the recipe leaves it open, is the rollout's limit of new tokens."""
        if self.aggregation.params.get("length", max_tokens) is not None:
            return self
        return replace(self, aggregation=Cell(self.aggregation.name, {**self.aggregation.params, "length": max_tokens}))

    def find_filter(self, name: str) -> Cell | None:
        return next((cell for cell in self.filters if cell.name == name), None)


_TOKEN, _SEQ_MEAN, _SEQ_SUM = Cell("token-mean"), Cell("seq-mean-token-mean"), Cell("seq-mean-token-sum")
_NORM = Cell("seq-mean-token-sum-norm")
_GRPO, _PPO = Cell("grpo"), Cell("ppo")
_CENTRED = Cell("grpo", {"std": "none"})

PRESETS: Mapping[str, Row] = {
    "grpo": Row(
        "GRPO without the KL term (the paper adds kl: {name: k3, coef: 0.04})",
        "arXiv:2402.03300",
        _GRPO,
        _PPO,
        _SEQ_MEAN,
    ),
    "dr_grpo": Row("GRPO without the divisions by deviation and length", "arXiv:2503.20783", _CENTRED, _PPO, _NORM),
    "rloo": Row(
        "REINFORCE with a leave-one-out baseline, one update per batch",
        "arXiv:2402.14740",
        Cell("rloo"),
        Cell("reinforce"),
        _SEQ_SUM,
    ),
    "remax": Row(
        "REINFORCE with the reward of the greedy answer as baseline (one sample per prompt is enough)",
        "arXiv:2310.10505",
        Cell("remax"),
        Cell("reinforce"),
        _SEQ_SUM,
    ),
    "reinforce": Row(
        "REINFORCE with the batch mean as baseline", "Williams 1992", Cell("batch_mean"), Cell("reinforce"), _SEQ_SUM
    ),
    "reinforce_pp": Row(
        "REINFORCE++: batch-whitened returns, KL in the reward",
        "arXiv:2501.03262",
        Cell("reinforce_pp"),
        _PPO,
        _TOKEN,
        kl=Cell("k1", {"coef": 0.01, "placement": "reward"}),
    ),
    "reinforce_pp_baseline": Row(
        "REINFORCE++ with a group baseline, KL (k2) in the loss",
        "arXiv:2501.03262",
        Cell("reinforce_pp_baseline"),
        _PPO,
        _TOKEN,
        kl=Cell("k2", {"coef": 0.001}),
    ),
    "ppo": Row(
        "PPO with a critic: GAE and a clipped value loss (train.critic)", "arXiv:1707.06347", Cell("gae"), _PPO, _TOKEN
    ),
    "dapo": Row(
        "clip-higher, token-mean, dynamic sampling, overlong penalty",
        "arXiv:2503.14476",
        _GRPO,
        Cell("ppo", {"eps_high": 0.28}),
        _TOKEN,
        filters=(Cell("dynamic_sampling"), Cell("overlong_penalty")),
    ),
    "gspo": Row("sequence-level ratio", "arXiv:2507.18071", _GRPO, Cell("gspo"), _SEQ_MEAN),
    "gspo_token": Row(
        "sequence-level ratio, token-level gradient", "arXiv:2507.18071", _GRPO, Cell("gspo_token"), _SEQ_MEAN
    ),
    "luspo": Row(
        "GSPO weighted by length", "arXiv:2602.05261", _GRPO, Cell("gspo", {"eps_low": 0.2, "eps_high": 0.25}), _SEQ_SUM
    ),
    "cispo": Row("clipped importance weight on log pi", "arXiv:2506.13585", _GRPO, Cell("cispo"), _TOKEN),
    "tis": Row(
        "two-sided truncated weight on log pi",
        "the seed",
        _GRPO,
        Cell("cispo", {"eps_low": 0.2, "eps_high": 0.2}),
        _TOKEN,
    ),
    "gmpo": Row("geometric mean of the token ratios", "arXiv:2507.20673", _GRPO, Cell("gmpo"), _SEQ_MEAN),
    "sapo": Row("soft gate in place of the clip", "arXiv:2511.20347", _GRPO, Cell("sapo"), _SEQ_MEAN),
    "topr": Row("full weight for successes, truncated for failures", "arXiv:2503.14286", _GRPO, Cell("topr"), _SEQ_SUM),
    "dppo_tv": Row("trust region on the token's probability", "arXiv:2602.04879", _GRPO, Cell("dppo"), _TOKEN),
    "dppo_kl": Row(
        "trust region on the token's Bernoulli KL",
        "arXiv:2602.04879",
        _GRPO,
        Cell("dppo", {"divergence": "kl", "delta_low": 0.05, "delta_high": 0.05}),
        _TOKEN,
    ),
    "vespo": Row("sequence weights that fade on both sides", "arXiv:2602.10693", _GRPO, Cell("vespo"), _TOKEN),
    "opo": Row(
        "length-weighted optimal baseline, exact on-policy", "arXiv:2505.23585", Cell("opo"), Cell("reinforce"), _TOKEN
    ),
    "gpg": Row(
        "plain policy gradient with rescaled group-centred rewards",
        "arXiv:2504.02546",
        Cell("gpg"),
        Cell("reinforce"),
        _TOKEN,
    ),
    "gdpo": Row("several rewards normalised one by one", "arXiv:2601.05242", Cell("gdpo"), _PPO, _SEQ_MEAN),
    "pass_at_k": Row("credit for the best of the group", "arXiv:2503.19595", Cell("pass_at_k"), _PPO, _SEQ_MEAN),
    "flash_reinforce": Row(
        "one sample per prompt, batch-mean baseline, trust gate",
        "FlashREINFORCE (Hu et al., 2026)",
        Cell("batch_mean"),
        Cell("flash_reinforce"),
        _SEQ_MEAN,
    ),
    "decoupled_ppo": Row(
        "PPO clip around a proximal policy, weighted by pi_prox / mu (train.old: trainer)",
        "arXiv:2110.00641",
        _GRPO,
        _PPO,
        _TOKEN,
        correction=Cell("decoupled"),
    ),
}


OFFLINE_PRESETS: Mapping[str, OfflineRow] = {
    "dpo": OfflineRow("direct preference optimisation", "arXiv:2305.18290", Cell("dpo")),
    "cdpo": OfflineRow(
        "conservative DPO: a tenth of the labels may be wrong",
        "arXiv:2305.18290",
        Cell("dpo", {"label_smoothing": 0.1}),
    ),
    "robust_dpo": OfflineRow(
        "DPO, unbiased for flipped labels", "arXiv:2403.00409", Cell("dpo", {"loss": "robust", "label_smoothing": 0.1})
    ),
    "dpo_hinge": OfflineRow("DPO with a hinge loss (SLiC)", "arXiv:2305.10425", Cell("dpo", {"loss": "hinge"})),
    "ipo": OfflineRow("identity preference optimisation", "arXiv:2310.12036", Cell("dpo", {"loss": "ipo"})),
    "simpo": OfflineRow("preference by mean log-probability, no reference", "arXiv:2405.14734", Cell("simpo")),
    "orpo": OfflineRow("likelihood and odds ratio in one stage, no reference", "arXiv:2403.07691", Cell("orpo")),
    "kto": OfflineRow("answers labelled good or bad, pairs not needed", "arXiv:2402.01306", Cell("kto")),
    "reward_model": OfflineRow(
        "a reward model for reward.functions: [{fn: model, args: {path: RUN/final}}]",
        "arXiv:2203.02155",
        Cell("bradley_terry"),
    ),
    "sft": OfflineRow("supervised fine-tuning on given answers", "", Cell("likelihood")),
}
ENTRY_POINTS = "quintet.presets"  # group under which an installed package offers rows


def find_row(preset: str) -> Row | OfflineRow:
    """The row of a preset's name: built in, an installed package's (entry point), or `package.module:ROW`.

    Raises `QuintetError` for a name that is none of these, or that leads to something else than a row.
    """
    builtin: dict[str, Row | OfflineRow] = {**OFFLINE_PRESETS, **PRESETS}
    if preset in builtin:
        return builtin[preset]
    offered = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    place = offered.get(preset, preset)
    if ":" not in place:
        raise QuintetError(_unknown("algorithm.preset", preset, [*builtin, *offered]))
    row = import_named(place, "preset")
    if not isinstance(row, Row | OfflineRow):
        raise QuintetError(f"algorithm.preset: {place!r} is a {type(row).__name__}, not a Row or OfflineRow")
    return row


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The preset's row with the overrides laid over it, every parameter filled in and checked.

    Raises `QuintetError` for an unknown preset, cell or parameter (with the nearest name), a value of the wrong
    type or range, a user's function that does not import, an option that would do nothing, and an offline preset.
    """
    row = find_row(config.preset)
    if isinstance(row, OfflineRow):
        raise QuintetError(f"algorithm.preset {config.preset} trains on given answers, it samples none")
    if config.objective is not None:
        raise QuintetError(f"algorithm.objective has no effect: preset {config.preset} is no offline one. Remove it")
    algorithm = Algorithm(
        preset=config.preset,
        advantage=_required("advantage", row.advantage, config.advantage),
        policy_loss=_required("policy_loss", row.policy_loss, config.policy_loss),
        aggregation=_required("aggregation", row.aggregation, config.aggregation),
        kl=override_cell("kl", row.kl, config.kl),
        correction=override_cell("correction", row.correction, config.correction),
        filters=_filters(row.filters, config.filters),
        entropy_coef=config.entropy_coef,
        max_staleness=config.max_staleness,
    )
    _check_combination(algorithm)
    return algorithm


def _traits(column: str, cell: Cell | None) -> frozenset[Trait]:
    return frozenset() if cell is None or cell.custom else COLUMNS[column][cell.name].traits


def _required(column: str, base: Cell, override: Mapping[str, Any] | str | None) -> Cell:
    cell = override_cell(column, base, override)
    if cell is None:
        raise QuintetError(f"algorithm.{column}: none is not possible here\nUse one of: {', '.join(COLUMNS[column])}")
    return cell


def override_cell(column: str, base: Cell | None, override: Mapping[str, Any] | str | None) -> Cell | None:
    """`base` (a preset's cell, or none) with a recipe's override over it, all parameters filled in."""
    if override is None:
        return None if base is None else _fill(column, base.name, base.params, {})
    given = {"name": override} if isinstance(override, str) else dict(override)
    name = given.pop("name", None)
    if name == "none":
        if given:
            raise QuintetError(f"algorithm.{column}: name none takes no parameters, got {', '.join(given)}")
        return None
    if name is None and base is None:
        raise QuintetError(
            f"algorithm.{column}: the preset has none, so {', '.join(map(str, given)) or 'this'} has no effect\n"
            f"Give it a name, one of: {', '.join(COLUMNS[column])}"
        )
    if base is not None and name in (None, base.name):
        return _fill(column, base.name, base.params, given)
    return _fill(column, str(name), {}, given)


def _filters(base: tuple[Cell, ...], override: list[dict[str, Any] | str] | None) -> tuple[Cell, ...]:
    if override is None:
        return tuple(_fill("filters", cell.name, cell.params, {}) for cell in base)
    known = {cell.name: cell for cell in base}
    cells: list[Cell] = []
    for item in override:
        name = item if isinstance(item, str) else item.get("name")
        if name is None:
            raise QuintetError(f"algorithm.filters: {item} has no name\nUse one of: {', '.join(COLUMNS['filters'])}")
        cell = override_cell("filters", known.get(name), item)
        if cell is None or cell.name in {c.name for c in cells}:
            raise QuintetError(
                f"algorithm.filters: {name!r} is not possible here (none, or named twice); no filter is []"
            )
        cells.append(cell)
    return tuple(cells)


def _fill(column: str, name: str, base: Mapping[str, Any], given: Mapping[str, Any]) -> Cell:
    if ":" in name and column in CUSTOM_COLUMNS:
        return _custom_cell(column, name, {**base, **given})
    cells = COLUMNS[column]
    if name not in cells:
        raise QuintetError(_unknown(f"algorithm.{column}", name, cells))
    spec = cells[name]
    for key in given:
        if key not in spec.params:
            raise QuintetError(_unknown(f"algorithm.{column} {name}: parameter", key, spec.params))
    params = {key: param.default for key, param in spec.params.items()} | dict(base)
    params |= {key: _value(f"algorithm.{column} {name}: {key}", spec.params[key], v) for key, v in given.items()}
    _check_effect(column, name, spec, given, params)
    low, high = params.get("low"), params.get("high")
    if low is not None and high is not None and not low < high:
        raise QuintetError(f"algorithm.{column} {name}: low {low:g} must be below high {high:g}")
    return Cell(name, params)


def _custom_cell(column: str, name: str, params: Mapping[str, Any]) -> Cell:
    signature = inspect.signature(load_custom(name, column))
    try:
        signature.bind(None, **params)
    except TypeError as error:
        raise QuintetError(f"algorithm.{column} {name}{signature}: {error}") from error
    return Cell(name, dict(params))


def _check_effect(column: str, name: str, spec: CellSpec, given: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    for key in given:
        condition = spec.params[key].only_if
        if condition is not None and params[condition[0]] not in condition[1]:
            values = " or ".join(str(v) for v in condition[1])
            raise QuintetError(
                f"algorithm.{column} {name}: {key} has no effect with {condition[0]} {params[condition[0]]}\n"
                f"Remove {key}, or set {condition[0]} to {values}"
            )


def _value(where: str, param: Param, value: Any) -> Any:
    """`value` as the parameter's type; raises `QuintetError`."""
    if value is None and param.optional:
        return None
    if param.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, param.kind) or (isinstance(value, bool) and param.kind is not bool):
        hint = " (YAML reads 1e-8 as text: write 1.0e-8)" if isinstance(value, str) and param.kind is float else ""
        raise QuintetError(f"{where} must be {_KINDS[param.kind]}, got {value!r}{hint}")
    if param.choices and value not in param.choices:
        raise QuintetError(_unknown(where, value, param.choices))
    if isinstance(value, int | float):
        _check_range(where, param, value)
    return value


def _check_range(where: str, param: Param, value: float) -> None:
    if param.low is not None and not value >= param.low:
        raise QuintetError(f"{where} must be at least {param.low:g}, got {value}")
    if param.high is not None and not value <= param.high:
        raise QuintetError(f"{where} must be at most {param.high:g}, got {value}")


_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text", dict: "a mapping"}


def _check_combination(algorithm: Algorithm) -> None:
    """Cells that are fine alone and wrong, or without effect, together."""
    kl, advantage = algorithm.kl, algorithm.advantage
    if kl is not None:
        _check_kl(kl)
    if Trait.OWN_WEIGHTS in _traits("policy_loss", algorithm.policy_loss) and algorithm.correction is not None:
        raise QuintetError(
            f"algorithm.correction {algorithm.correction.name} would count the importance weight twice: policy_loss "
            f"{algorithm.policy_loss.name} weighs against the sampler itself\nRemove algorithm.correction"
        )
    if Trait.REWARD_PARTS in _traits("advantage", advantage):
        shaping = [f"filters {c.name}" for c in algorithm.filters if c.name in ("overlong_penalty", "reward_clip")]
        if kl is not None and kl.params["placement"] == "reward":
            shaping.append("kl with placement reward")
        if shaping:
            raise QuintetError(
                f"algorithm.{shaping[0]} has no effect: advantage {advantage.name} reads the parts of the reward, not "
                f"its total\nRemove it, or choose another advantage"
            )


def _check_kl(kl: Cell) -> None:
    in_loss = kl.params["placement"] == "loss"
    if kl.params["target"] is not None and kl.params["coef"] == 0.0:
        raise QuintetError("algorithm.kl: target multiplies coef, which is 0: it stays 0. Set coef above 0")
    if kl.params["target"] is None and kl.params["horizon"] != COLUMNS["kl"][kl.name].params["horizon"].default:
        raise QuintetError("algorithm.kl: horizon has no effect without a target. Remove it, or set target")
    if in_loss and kl.name == "k1" and kl.params["gradient"] == "own" and not kl.params["importance_weight"]:
        raise QuintetError(
            "algorithm.kl: k1 in the loss has no restoring gradient (it averages to 0 whatever the reference says)\n"
            "Use name k2 or k3, or placement reward, or gradient k2"
        )
    if not in_loss and kl.params["coef"] == 0.0:
        raise QuintetError("algorithm.kl: coef 0 with placement reward has no effect\nUse name none, or a coef above 0")


def _unknown(where: str, name: Any, known: Any) -> str:
    nearest = get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{where}: unknown {name!r}; {hint}Known: {', '.join(map(str, known)) or 'no parameters'}"

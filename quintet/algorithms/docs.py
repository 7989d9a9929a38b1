"""Prints docs/algorithms.md from the tables: `python -m quintet.algorithms.docs`."""

from __future__ import annotations

from quintet.algorithms.cells import COLUMNS, CellSpec, Param
from quintet.algorithms.presets import PRESETS, Cell, Row

TITLES = {
    "advantage": "Advantages",
    "policy_loss": "Policy losses",
    "aggregation": "Aggregations",
    "kl": "KL estimators",
    "correction": "Corrections",
    "filters": "Filters",
}

INTRODUCTION = """\
# Algorithms

<!-- Generated: python -m quintet.algorithms.docs > docs/algorithms.md -->

An algorithm is a row: advantage x policy loss x aggregation x KL x correction x filters. A recipe names a row and may
replace any cell of it:

```yaml
algorithm:
  preset: grpo
  advantage: {std: sample}                # the preset's function, one parameter changed
  policy_loss: {name: ppo, eps_high: 0.28}
  aggregation: token-mean
  kl: {name: k3, coef: 0.04}              # none takes a cell away
  filters: [dynamic_sampling]             # the whole list is replaced; [] is no filter
```

An unknown name, a parameter that the function does not have, and a parameter that would do nothing are errors.

Notation: ratio = pi / pi_old, mu is the sampler, A the advantage, sg a stop-gradient.

- A group whose rewards are all equal gets advantage exactly 0; the KL and entropy terms still act on its tokens.
- A group of one gets advantage 0 from estimators that compare within a group (`singleton: raw` where offered).
- Unscored samples are in no statistic and in no loss.
- Means divide once, by the counts of the whole optimizer step. A correction leaves these counts alone.
- The log ratio is clamped to +-20 before exp.
- k1 averages to a zero gradient as a loss term and is refused there; k2 or k3 in the loss, or k1 in the reward.
"""

CUSTOM = """\
## Your own

`advantage` and `policy_loss` also take `package.module:function`; the other keys of the cell are its parameters.

```python
from torch import Tensor
from quintet.algorithms.advantage import AdvantageInput
from quintet.algorithms.policy_loss import LossInput, LossTerms


def best_minus_mean(x: AdvantageInput, *, scale: float = 1.0) -> Tensor:
    # float64; one number per sample [N], or per token [N, T]
    return scale * (x.rewards_N - x.rewards_N.mean())


def squared_ratio(x: LossInput, *, weight: float = 0.1) -> LossTerms:
    # the loss of every token [B, T], not masked, not averaged; indicators become the metrics actor/<name>
    loss_BT = -x.ratio_BT * x.advantages_BT + weight * x.log_ratio_BT.square()
    return LossTerms(loss_BT, {"moved_frac": x.log_ratio_BT.abs() > 0.1})
```

```yaml
algorithm:
  advantage: {name: "my_package.my_module:best_minus_mean", scale: 0.5}
  policy_loss: "my_package.my_module:squared_ratio"
```

## Functions without a row yet

In `quintet.algorithms.estimators`: `gae` (needs a critic), `remax` (needs a greedy answer). In `value`: `value_loss`,
`explained_variance`. In `preference`: `dpo` (sigmoid, hinge, ipo, robust, with label smoothing), `simpo`, `orpo_odds`,
`kto`, `bradley_terry`. In `kl`: `full_kl`. In `logprobs`: log-probabilities, entropy and kept sets under temperature,
top-k, top-p and min-p.
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION, _presets(), *(_column(name) for name in COLUMNS), CUSTOM]
    return "\n".join(parts)


def _presets() -> str:
    head = "| preset | advantage | policy loss | aggregation | KL | correction | filters |\n" + "|---" * 7 + "|\n"
    rows = [_row(name, row) for name, row in PRESETS.items()]
    notes = [f"- `{name}`: {row.doc}" for name, row in PRESETS.items()]
    return "## Presets\n\n" + head + "\n".join(rows) + "\n\n" + "\n".join(notes) + "\n"


def _row(name: str, row: Row) -> str:
    cells = [row.advantage, row.policy_loss, row.aggregation, row.kl, row.correction]
    shown = [_cell(c) for c in cells] + [", ".join(_cell(c) for c in row.filters)]
    return f"| `{name}` | " + " | ".join(shown) + " |"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return cell.name + ("" if not cell.params else f" ({', '.join(f'{k} {v}' for k, v in cell.params.items())})")


def _column(name: str) -> str:
    return f"## {TITLES[name]}\n\n" + "\n".join(_entry(n, spec) for n, spec in COLUMNS[name].items()) + "\n"


def _entry(name: str, spec: CellSpec) -> str:
    source = f" ({spec.source})" if spec.source else ""
    lines = [f"- **{name}**: {spec.doc}{source}"]
    lines += [f"  - `{key}` = {_default(param)}: {param.doc}{_condition(param)}" for key, param in spec.params.items()]
    return "\n".join(lines)


def _default(param: Param) -> str:
    if param.default is None:
        return "null"
    return f"{param.default:g}" if isinstance(param.default, float) else str(param.default)


def _condition(param: Param) -> str:
    choices = f" [{', '.join(param.choices)}]" if param.choices else ""
    if param.only_if is None:
        return choices
    return f"{choices} (with {param.only_if[0]} {' or '.join(map(str, param.only_if[1]))})"


if __name__ == "__main__":
    print(render(), end="")

"""The tables as data (`quintet algorithms`) and as a page: `python -m quintet.algorithms.docs > docs/algorithms.md`."""

from __future__ import annotations

from quintet.algorithms.cells import COLUMNS, CellSpec, Param
from quintet.algorithms.presets import OFFLINE_PRESETS, PRESETS, Cell

TITLES = {
    "advantage": "Advantages",
    "policy_loss": "Policy losses",
    "aggregation": "Aggregations",
    "kl": "KL estimators",
    "correction": "Corrections",
    "filters": "Filters",
    "objective": "Objectives of offline presets",
}

INTRODUCTION = """\
# Algorithms

<!-- Generated: python -m quintet.algorithms.docs > docs/algorithms.md -->

An algorithm is a row: advantage x policy loss x aggregation x KL x correction x filters. A recipe names a row and may
replace any cell of it (`quintet algorithms` prints the table, `--json` with every parameter):

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

Notation: ratio = pi / pi_old, mu is the sampler, A the advantage, r the reward, sg a stop-gradient, ref the frozen
reference policy (the policy as it was when the run began).

- A group whose rewards are all equal gets advantage exactly 0; the KL and entropy terms still act on its tokens.
- A group of one gets advantage 0 from estimators that compare within a group (`singleton: raw` where offered).
- Unscored samples are in no statistic and in no loss.
- Means divide once, by the counts of the whole optimizer step. A correction leaves these counts alone.
- The log ratio is clamped to +-20 before exp.
- k1 averages to a zero gradient as a loss term and is refused there; k2 or k3 in the loss, or k1 in the reward.
"""

OFFLINE = """\
## Offline presets

They train on given answers; `quintet train` runs them as it runs the others. `steps` are optimizer steps of
`offline.batch_size` rows. Rows are `prompt, chosen, rejected` (strings or messages; without `prompt`, two conversations
that differ in their last message), for `kto` also `prompt, completion, label`, for `sft` `messages` or `prompt` with
`completion` or an answer. Log-probabilities of an answer are sums over its tokens, its end token among them, unless the
formula says mean. Held-out rows give `eval/loss` and, of pairs, `eval/pair_accuracy` (a tie counts half) and
`eval/margin`: the reward of the chosen minus that of the rejected answer, where the reward is beta log(pi / ref) (dpo,
kto), beta times the mean log-probability (simpo, orpo) or the reward model's.

"""

CRITIC = """\
## The critic of ppo

A copy of the policy's body with a head of one number (`train.critic`), updated once per mini-batch beside the policy:

    loss = token-mean of 1/2 max((V - R)^2, (V_clip - R)^2),  V_clip = V_old + clamp(V - V_old, -clip, clip)
    R = V_old + GAE(gamma, lam)        critic/explained_variance = 1 - Var(R - V_old) / Var(R)

V of a token is read where the token is predicted. "Next" in GAE is the next token of the policy: values of tool tokens
and padding are never read. `bootstrap: true` in the `gae` cell adds gamma V after the last token of a response that was
cut off; the default takes its reward as final.
"""

MORE = """\
## The greedy answer of remax

Each group has one rollout more, at temperature 0. It is generated beside the samples, scored and journaled with them
(`greedy` in its record, last in its group), shaped by the same filters, and never trained on. A group whose greedy
answer failed is tried again; one whose greedy answer could not be scored is left out. `reward/greedy_mean` is its mean
reward.

## An adaptive KL coefficient

`target` in a `kl` cell lets `coef` follow the KL that is measured (`kl/ref` in the loss, `kl/in_reward` in the reward,
nats a token), after every step:

    coef <- coef (1 + clip(KL / target - 1, -0.2, 0.2) samples / horizon)

`kl/coef` is where it stands; checkpoints keep it, and a resumed or replayed run has the same. Without `target` it is
fixed.

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

A whole row of yours is a preset: `preset: "my_package.my_module:MY_ROW"`, or, of an installed package, the name that it
declares as an entry point (group `quintet.presets`, e.g. `my_algo = "my_package.my_module:MY_ROW"`).

```python
from quintet.algorithms.presets import Cell, Row

MY_ROW = Row("what it is", "its paper", Cell("my_package.my_module:best_minus_mean"), Cell("ppo"), Cell("token-mean"))
```

## Functions without a row yet

In `quintet.algorithms.logprobs`: log-probabilities, entropy and kept sets under temperature, top-k, top-p and min-p.
"""

ONLINE_COLUMNS = ("advantage", "policy_loss", "aggregation", "kl", "correction", "filters")


def render() -> str:
    """The whole page."""
    online = {r["preset"]: r for r in preset_table() if "objective" not in r}
    offline = {r["preset"]: r for r in preset_table() if "objective" in r}
    columns = {name: _column(name) for name in COLUMNS}
    parts = [
        INTRODUCTION,
        "## Presets\n\n" + _markdown(online, ("paper", *ONLINE_COLUMNS)),
        OFFLINE + _markdown(offline, ("paper", "objective")),
        *(columns[name] for name in COLUMNS),
        CRITIC,
        MORE + CUSTOM,
    ]
    return "\n".join(parts)


def preset_table() -> list[dict[str, str]]:
    """One dict per built-in preset: `preset`, `doc`, `paper`, and each of its cells as text (offline: `objective`)."""
    rows = []
    for name, row in PRESETS.items():
        cells = {c: _cell(getattr(row, c)) for c in ONLINE_COLUMNS if c != "filters"}
        cells["filters"] = ", ".join(_cell(c) for c in row.filters)
        rows.append({"preset": name, "doc": row.doc, "paper": row.source, **cells})
    for name, offline in OFFLINE_PRESETS.items():
        cell = {"objective": _cell(offline.objective)}
        rows.append({"preset": name, "doc": offline.doc, "paper": offline.source, **cell})
    return rows


def _markdown(rows: dict[str, dict[str, str]], columns: tuple[str, ...]) -> str:
    """A table of the rows, and a line on each."""
    head = ["preset", *(c.replace("_", " ") for c in columns)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += [f"| `{name}` | " + " | ".join(row[c] for c in columns) + " |" for name, row in rows.items()]
    return "\n".join([*lines, "", *(f"- `{name}`: {row['doc']}" for name, row in rows.items())]) + "\n"


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

"""The recipe of tests that do a whole run: a model of 50 thousand weights that adds two digits, seconds a run."""

from __future__ import annotations

from typing import Any

TINY_MODEL: dict[str, Any] = {
    "name": "builtin:tiny",
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "max_position": 32},
}

SMALL: dict[str, Any] = {
    "name": "small",
    "steps": 3,
    "model": TINY_MODEL,
    "data": {"source": "task:sums", "args": {"max": 9, "template": "{a}+{b}="}, "eval_size": 20},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_tokens": 3},
    "reward": {"functions": [{"fn": "exact"}]},
    "train": {"lr": 1e-3},
}


def small(**sections: Any) -> dict[str, Any]:
    """SMALL with sections laid over it, one level deep."""
    out = dict(SMALL)
    for name, value in sections.items():
        out[name] = {**out.get(name, {}), **value} if isinstance(value, dict) else value
    return out


def without_clock(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what measures the machine: two equal runs agree on the rest to the bit."""
    measured = ("time/", "memory/", "engine/", "reward/grade_s_", "reward/slowest_share")
    return {k: v for k, v in row.items() if not k.startswith(measured) and not k.endswith("per_s")}

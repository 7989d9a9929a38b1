"""What a run writes down as it goes: readable rollouts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quintet.types import Group, Rollout, Score


def write_samples(folder: Path, step: int, groups: list[Group], limit: int, decode: Callable[[list[int]], str]) -> None:
    """Up to `limit` rollouts of a step into `folder/step-NNNNNN.jsonl`: by turns the best, the worst and the most
    surprising (lowest mean log-probability) of those not yet chosen."""
    rows = [(g, r, s) for g in groups for r, s in zip(g.rollouts, g.scores, strict=True)]
    chosen = [rows[i] for i in _by_turns([_rank(s) for _, _, s in rows], [_surprise(r) for _, r, _ in rows])[:limit]]
    lines = [
        json.dumps(_row(step, group, rollout, score, decode), ensure_ascii=False) + "\n"
        for group, rollout, score in chosen
    ]
    (folder / f"step-{step:06d}.jsonl").write_text("".join(lines), encoding="utf-8")


def _rank(score: Score) -> float:
    return -math.inf if score.reward is None else score.reward


def _surprise(rollout: Rollout) -> float:
    """Mean log-probability of the sampled tokens; +inf where there is none, so that it is chosen last."""
    own = [p for p, m in zip(rollout.logprobs, rollout.loss_mask, strict=True) if m]
    return sum(own) / len(own) if own else math.inf


def _by_turns(rewards: list[float], surprise: list[float]) -> list[int]:
    """All places: highest reward, lowest reward, lowest surprise value, second highest, ..., none twice."""
    down = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    up = sorted(range(len(rewards)), key=lambda i: rewards[i])
    odd = sorted(range(len(rewards)), key=lambda i: surprise[i])
    return list(dict.fromkeys(i for turn in zip(down, up, odd, strict=True) for i in turn))


def _row(step: int, group: Group, rollout: Rollout, score: Score, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    prompt = group.prompt
    row: dict[str, Any] = {
        "step": step,
        "group": str(group.group_id),
        "sample": rollout.sample_index,
        "prompt": prompt.messages if prompt.text is None else prompt.text,
        "answer": prompt.answer,
        "text": rollout.text,
        "finish_reason": rollout.finish_reason.value,
        "reward": score.reward,
        "parts": score.parts,
        "tokens": [decode([token]) for token in rollout.response_ids],
        "logprobs": rollout.logprobs,
    }
    if score.failure is not None:
        row["failure"] = f"{score.failure.kind.value}: {score.failure.message}"
    return row

from __future__ import annotations

import json
from pathlib import Path

from quintet.observe.record import write_samples
from quintet.types import FinishReason, Group, GroupId, Prompt, Rollout, Score


def a_group(rewards: list[float | None], logprobs: list[float]) -> Group:
    prompt = Prompt("p", [1], text="1+1=", answer="2")
    rollouts = [
        Rollout(GroupId("p"), i, [1], [5, 6], f"t{i}", [logprob, 0.0], [1, 0], [], FinishReason.STOP)
        for i, logprob in enumerate(logprobs)
    ]
    return Group(GroupId("p"), prompt, rollouts, [Score(r) for r in rewards])


def test_best_worst_and_most_surprising_are_kept_by_turns(tmp_path: Path) -> None:
    group = a_group([0.5, 1.0, 0.0, 0.5, 0.75, 0.25], [-1.0, -0.5, -0.25, -9.0, -0.5, -2.0])
    write_samples(tmp_path, 7, [group], 4, lambda ids: f"<{ids[0]}>")
    rows = [json.loads(line) for line in (tmp_path / "step-000007.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == ["t1", "t2", "t3", "t4"]
    assert rows[0]["tokens"] == ["<5>", "<6>"] and rows[0]["step"] == 7 and rows[0]["answer"] == "2"


def test_all_samples_are_kept_once_when_there_is_room(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [a_group([None, 1.0], [-3.0, -1.0])], 8, str)
    rows = [json.loads(line) for line in (tmp_path / "step-000001.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0, None]

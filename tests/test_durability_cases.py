"""Reported failures of other programs around checkpoints and asynchronous buffers (tests/data/cases_durability.jsonl).

The larger ones are tests of their own, named here: CKP06 and CKP08 `test_durability.py`, BUF03 and BUF04
`controller/test_controller.py`, CKP04 `controller/test_state.py`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.buffer.buffer import JournaledBuffer
from quintet.buffer.journal import SqliteJournal
from quintet.controller.experience import sample_metrics
from quintet.train.config import TrainConfig
from quintet.train.optimizer import Optimizer
from quintet.types import FinishReason, Group, GroupId, GroupState, Prompt, Rollout, Score, VersionRun
from tests.controller.simulation import Simulation

CASES: dict[str, dict[str, Any]] = {
    row["id"]: row
    for row in map(json.loads, (Path(__file__).parent / "data/cases_durability.jsonl").read_text().splitlines())
}


def test_every_case_has_a_test() -> None:
    root = Path(__file__).parent
    text = "".join(p.read_text() for p in [*root.glob("test_durability*.py"), *root.glob("controller/test_*.py")])
    assert [name for name in CASES if text.count(name) == 0] == []


def test_buf01_the_room_after_a_resume_counts_what_was_consumed_before(tmp_path: Path) -> None:
    given, expected = CASES["BUF01"]["input"], CASES["BUF01"]["expect"]["new_requests_allowed"]
    version, batch, eta = given["version_after_resume"], given["batch"], given["max_staleness"]
    ids = [f"p{i}" for i in range(1000)]
    path = tmp_path / "journal.sqlite"
    first = Simulation(version, batch, eta, prompt_ids=ids, journal=SqliteJournal(path))
    first.run()
    assert len(first.rollout.asked) == version * batch
    second = Simulation(
        version + 10, batch, eta, prompt_ids=ids, journal=SqliteJournal(path), resume_from=version, train_seconds=1e6
    )
    second.run()
    at_once = [group for group, asked_at in second.rollout.asked if asked_at == version]
    assert len(at_once) == expected
    assert at_once[0] == f"p{version * batch}/e0.o0.a0"


def test_buf06_no_prompt_twice_and_none_lost_within_an_epoch(tmp_path: Path) -> None:
    given, expected = CASES["BUF06"]["input"], CASES["BUF06"]["expect"]
    ids = [str(i) for i in given["dataset_ids"]]
    path, stop = tmp_path / "journal.sqlite", given["stop_after_step"]
    first = Simulation(stop, given["batch"], prompt_ids=ids, journal=SqliteJournal(path))
    first.run()
    second = Simulation(
        len(ids) // given["batch"], given["batch"], prompt_ids=ids, journal=SqliteJournal(path), resume_from=stop
    )
    second.run()
    before, after = ({g for _, groups in run.train.trained for g in groups} for run in (first, second))
    assert (len(before), len(after)) == (expected["consumed_before"], expected["consumed_after_resume"])
    assert (len(before & after), len(before | after)) == (expected["overlap"], expected["union"])


def test_buf08_staleness_is_the_version_at_use_minus_the_version_at_generation() -> None:
    given, expected = CASES["BUF08"]["input"], CASES["BUF08"]["expect"]
    prompt = Prompt("p", [1])
    groups = [
        Group(
            GroupId("p", occurrence=i),
            prompt,
            [Rollout(GroupId("p"), 0, [1], [5, 6], "", [0.0] * 2, [1, 1], [VersionRun(v, 2)], FinishReason.STOP)],
            [Score(1.0)],
        )
        for i, v in enumerate(given["sample_versions"])
    ]
    values = sample_metrics(groups, given["train_version"])
    assert values["buffer/staleness_mean"] == pytest.approx(expected["mean"], abs=1e-6)
    assert values["buffer/staleness_max"] == expected["max"]
    each = [sample_metrics([g], given["train_version"])["buffer/staleness_max"] for g in groups]
    assert each == expected["staleness"]


def test_ckp01_a_resume_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    given, expected = CASES["CKP01"]["input"], CASES["CKP01"]["expect"]
    per_epoch, saved_at = given["steps_per_epoch"], given["saved_at"]
    ids = [f"p{i}" for i in range(4 * per_epoch)]
    path = tmp_path / "journal.sqlite"
    Simulation(saved_at, prompt_ids=ids, epochs=given["epochs"], journal=SqliteJournal(path)).run()
    resumed = Simulation(100, prompt_ids=ids, epochs=given["epochs"], journal=SqliteJournal(path), resume_from=saved_at)
    steps = [m.step for m in resumed.run()]
    assert (steps[0], steps[-1]) == (expected["next_step"], expected["last_step"])
    assert {g.split("/")[1] for _, groups in resumed.train.trained for g in groups} == {"e1.o0.a0"}


def rate_after(config: TrainConfig, total_steps: int, saved_at: int) -> float:
    """The learning rate of the first step after a checkpoint of `saved_at` optimizer steps was loaded."""
    model = torch.nn.Linear(2, 2)
    optimizer = Optimizer(model, config, total_steps)
    optimizer.load_state({}, saved_at)
    model(torch.ones(1, 2)).sum().backward()
    return optimizer.step().lr


def test_ckp02_the_schedule_is_not_advanced_by_loading() -> None:
    given, expected = CASES["CKP02"]["input"], CASES["CKP02"]["expect"]
    config = TrainConfig(lr=given["lr0"], schedule="linear")
    assert rate_after(config, 1000, given["saved_at"]) == pytest.approx(expected["lr_at_next_step"])


def test_ckp09_what_starts_anew_starts_with_the_initial_rate() -> None:
    """There is no option to skip the schedule on load. A fork begins its own: see
    `test_a_fork_starts_a_new_run_from_the_newest_weights_and_leaves_the_old_one_alone`."""
    assert CASES["CKP09"]["expect"] == {"lr_at_first_step": "initial lr"}
    assert rate_after(TrainConfig(lr=0.25, schedule="cosine"), 100, saved_at=0) == 0.25


def test_ckp08_counts_and_drops_of_the_buffer_are_what_they_were(tmp_path: Path) -> None:
    ids = [f"equal{i}" if i % 3 == 0 else f"p{i}" for i in range(64)]
    path = tmp_path / "journal.sqlite"
    run = Simulation(3, preset="dapo", prompt_ids=ids, journal=SqliteJournal(path))
    run.run()
    before = run.buffer.stats()
    assert before.dropped["equal_rewards"] > 0
    after = JournaledBuffer(SqliteJournal(path), max_staleness=0, resume_from=3)
    asyncio.run(after.resume())
    assert after.stats() == before


def test_the_drops_of_a_redone_step_are_its_metrics_again(tmp_path: Path) -> None:
    ids = [f"equal{i}" if i % 3 == 0 else f"p{i}" for i in range(64)]
    path = tmp_path / "journal.sqlite"
    first = Simulation(3, preset="dapo", prompt_ids=ids, journal=SqliteJournal(path))
    second = Simulation(4, preset="dapo", prompt_ids=ids, journal=SqliteJournal(path), resume_from=1)
    drops = [[m.values.get("dropped/equal_rewards") for m in run.run()] for run in (first, second)]
    assert drops[1][:2] == drops[0][1:]


def test_groups_in_flight_wait_for_the_version_they_were_admitted_at(tmp_path: Path) -> None:
    """One step to redo, and groups of the next one admitted: they are generated with the redone step's weights."""
    path = tmp_path / "journal.sqlite"

    async def first_life() -> None:
        buffer = JournaledBuffer(SqliteJournal(path), max_staleness=0)
        groups = [Group(GroupId(f"p{i}"), Prompt(f"p{i}", [1])) for i in range(4)]
        await buffer.admit(groups)
        for g in groups:
            versions = [VersionRun(0, 2)]
            g.rollouts = [Rollout(g.group_id, 0, [1], [2, 3], "x", [-1.0] * 2, [1] * 2, versions, FinishReason.STOP)]
            await buffer.advance(g, GroupState.GENERATED)
            g.scores = [Score(1.0)]
            await buffer.advance(g, GroupState.SCORED)
            await buffer.advance(g, GroupState.READY)
        await buffer.take(4, 0)
        await buffer.commit(1, 1)
        await buffer.admit([Group(GroupId(f"p{i}"), Prompt(f"p{i}", [1])) for i in range(4, 8)])

    asyncio.run(first_life())
    run = Simulation(2, journal=SqliteJournal(path))
    metrics = run.run()
    assert run.rollout.asked == [(f"p{i}/e0.o0.a0", 1) for i in range(4, 8)]
    assert [m.values["buffer/staleness_max"] for m in metrics] == [0.0, 0.0]
    assert run.buffer.stats().dropped == {}

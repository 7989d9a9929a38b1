"""The promise of the redo log, tested by killing: SIGKILL anywhere, resume with the same call, the same weights.

The killing is done by `durability_runs.py`. The default run kills at five moments, the heavy one at all.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import math
import random
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import quintet
from quintet import api
from quintet.buffer.journal import SqliteJournal
from quintet.buffer.reading import JournalReader
from quintet.cli.main import app
from quintet.cluster.folder import RunFolder
from quintet.cluster.replay import replay
from quintet.observe.metrics import read_metrics
from quintet.types import QuintetError
from tests.durability_runs import Runs, low_digits
from tests.small_recipe import TINY_MODEL, without_clock

STEPS, GROUPS, SAMPLES = 12, 4, 4

CONFIG: dict[str, Any] = {
    "name": "durable",
    "steps": STEPS,
    "seed": 3,
    "model": TINY_MODEL,
    "data": {"source": "task:sums", "args": {"max": 9, "template": "{a}+{b}="}, "eval_size": 8},
    "warm_start": {"steps": 3, "batch_size": 8},
    "rollout": {"groups_per_step": GROUPS, "group_size": SAMPLES, "max_tokens": 3, "numerics": "reproducible"},
    "train": {"lr": 3e-3, "old": "trainer", "mini_batches": 2},
    "checkpoint": {"every": 3},
}

# (what is going on, function, n-th call, before or after it)
MOMENTS: list[tuple[str, str, int, str]] = [
    ("folder claimed", "quintet.cluster.local:RunFolder.claim", 1, "after"),
    ("warm start being saved", "quintet.models.export:_swap", 1, "before"),
    ("generation of the first step", "quintet.rollout.engine.engine:Engine.step", 8, "before"),
    ("generation later on", "quintet.rollout.engine.engine:Engine.step", 34, "after"),
    ("a trajectory being journaled", "quintet.buffer.journal:SqliteJournal._insert_rollouts", 18, "after"),
    ("scoring", "quintet.reward.service:LocalRewardService._grade", 15, "before"),
    ("scores being journaled", "quintet.buffer.journal:SqliteJournal._insert_scores", 30, "after"),
    ("before ASSIGNED", "quintet.buffer.journal:SqliteJournal.assign", 5, "before"),
    ("inside ASSIGNED", "quintet.buffer.journal:SqliteJournal._write_edge", 92, "after"),
    ("after ASSIGNED", "quintet.buffer.journal:SqliteJournal.assign", 8, "after"),
    ("before backward", "torch:Tensor.backward", 9, "before"),
    ("after backward", "torch:Tensor.backward", 12, "after"),
    ("between optimizer steps", "quintet.train.optimizer:Optimizer.step", 14, "after"),
    ("publication", "quintet.weights.memory:MemoryStore.publish", 6, "before"),
    ("published, not loaded", "quintet.rollout.engine.worker:EngineWorker._update", 5, "before"),
    ("version journaled, not committed", "quintet.buffer.journal:SqliteJournal.version", 9, "after"),
    ("committed, metrics not written", "quintet.buffer.journal:SqliteJournal.trained", 7, "after"),
    ("checkpoint half written", "quintet.train.checkpoint:_save_tensors", 4, "after"),
    ("checkpoint before its rename", "quintet.controller.state:_seal", 2, "after"),
    ("checkpoint renamed, old ones not deleted", "quintet.controller.state:_prune", 3, "before"),
    ("final export", "quintet.models.export:_swap", 2, "before"),
    ("summary of the finished run", "quintet.cluster.logbook:write_summary", 4, "before"),
]
QUICK = ("generation later on", "after ASSIGNED", "between optimizer steps", "checkpoint half written", "final export")
ETA_2 = MOMENTS[2:18:2] + MOMENTS[19:21]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    server = Runs(tmp_path_factory.mktemp("said") / "messages.txt")
    yield server
    server.close()


@pytest.fixture(scope="module")
def straight(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert runs(folder, CONFIG) == 0
    return folder


def with_eta(eta: int) -> dict[str, Any]:
    return CONFIG | {"algorithm": {"max_staleness": eta}}


def final_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "final/model.safetensors").read_bytes()).hexdigest()


def history(folder: Path) -> list[dict[str, Any]]:
    """Every metric that is not a time."""
    return [without_clock(row) for row in read_metrics(folder / "metrics.jsonl")]


def check_accounting(folder: Path) -> None:
    """From the journal alone: trained exactly once or dropped with a reason, nothing finished generated twice."""
    db = sqlite3.connect(folder / "journal.sqlite")
    states = db.execute("SELECT state, reason FROM groups").fetchall()
    assert {state for state, _ in states} <= {"trained", "dropped"}
    assert all(reason for state, reason in states if state == "dropped")
    twice = db.execute("SELECT group_id, state FROM edges GROUP BY group_id, state HAVING count(*) > 1").fetchall()
    assert twice == []
    trained = db.execute("SELECT group_id, step FROM groups WHERE state='trained' ORDER BY step, position").fetchall()
    assert [step for _, step in trained] == [s for s in range(1, STEPS + 1) for _ in range(GROUPS)]
    edges = dict(db.execute("SELECT group_id, count(*) FROM edges WHERE state='trained' GROUP BY group_id"))
    assert edges == {group: 1 for group, _ in trained}
    both = db.execute(
        "SELECT group_id FROM edges WHERE state='trained' INTERSECT SELECT group_id FROM edges WHERE state='dropped'"
    ).fetchall()
    assert both == []
    samples = dict(db.execute("SELECT group_id, count(*) FROM trajectories GROUP BY group_id"))
    assert all(samples[group] == SAMPLES for group, _ in trained)
    assert [v for (v,) in db.execute("SELECT version FROM versions ORDER BY version")] == list(range(STEPS + 1))
    db.close()
    rows = [row["step"] for row in history(folder)]
    assert rows == list(range(STEPS + 1))


def killed_and_resumed(runs: Runs, folder: Path, eta: int, moment: tuple[str, str, int, str]) -> None:
    what, function, call, when = moment
    config = with_eta(eta)
    assert runs(folder, config, (function, call, when)) == -9, f"{what}: the run was not hit"
    assert runs(folder, config) == 0, runs.said()
    check_accounting(folder)


@pytest.mark.parametrize("what", QUICK)
def test_a_run_killed_at_any_moment_ends_with_the_same_weights(
    runs: Runs, straight: Path, tmp_path: Path, what: str
) -> None:
    moment = next(m for m in MOMENTS if m[0] == what)
    killed_and_resumed(runs, tmp_path / "run", 0, moment)
    assert final_digest(tmp_path / "run") == final_digest(straight)
    assert history(tmp_path / "run") == history(straight)


@pytest.mark.heavy
@pytest.mark.parametrize("moment", [m for m in MOMENTS if m[0] not in QUICK], ids=lambda m: m[0])
def test_a_run_killed_at_every_other_moment_ends_with_the_same_weights(
    runs: Runs, straight: Path, tmp_path: Path, moment: tuple[str, str, int, str]
) -> None:
    killed_and_resumed(runs, tmp_path / "run", 0, moment)
    assert final_digest(tmp_path / "run") == final_digest(straight)
    assert history(tmp_path / "run") == history(straight)


@pytest.mark.heavy
def test_a_run_killed_again_and_again_ends_with_the_same_weights(runs: Runs, straight: Path, tmp_path: Path) -> None:
    for _what, function, call, when in MOMENTS[2:16]:
        code = runs(tmp_path / "run", with_eta(0), (function, min(call, 6), when))
        assert code in (-9, 0)
    assert runs(tmp_path / "run", with_eta(0)) == 0
    check_accounting(tmp_path / "run")
    assert final_digest(tmp_path / "run") == final_digest(straight)


@pytest.mark.heavy
@pytest.mark.parametrize("moment", ETA_2, ids=lambda m: m[0])
def test_with_staleness_2_the_accounting_holds_after_a_kill(
    runs: Runs, tmp_path: Path, moment: tuple[str, str, int, str]
) -> None:
    killed_and_resumed(runs, tmp_path / "run", 2, moment)


# -- what is damaged, and what is said of it -----------------------------------------------------------

IN_STEP_8 = ("quintet.buffer.journal:SqliteJournal.assign", 8, "after")


@pytest.fixture
def interrupted(runs: Runs, tmp_path: Path) -> Path:
    """A run killed in step 8: checkpoints of steps 3 and 6, steps 7 and 8 in the journal only."""
    folder = tmp_path / "run"
    assert runs(folder, with_eta(0), IN_STEP_8) == -9
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-3", "step-6"]
    return folder


def test_a_checkpoint_cut_in_half_is_passed_over_and_named(runs: Runs, straight: Path, interrupted: Path) -> None:
    weights = interrupted / "checkpoints/step-6/model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert runs(interrupted, with_eta(0)) == 0, runs.said()
    assert "checkpoint step-6 is not whole (model.safetensors is missing or cut); using an older one." in runs.said()
    check_accounting(interrupted)
    assert final_digest(interrupted) == final_digest(straight)


def test_a_journal_with_a_damaged_last_page_is_cut_back_and_what_was_lost_is_said(
    runs: Runs, straight: Path, interrupted: Path
) -> None:
    journal = interrupted / "journal.sqlite"
    sqlite3.connect(journal).execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
    blob = bytearray(journal.read_bytes())
    blob[-4096:] = b"\xa5" * 4096
    journal.write_bytes(blob)
    assert runs(interrupted, with_eta(0)) == 0, runs.said()
    assert "the journal is damaged" in runs.said() and "going on after step" in runs.said()
    assert (interrupted / "journal.damaged-1.sqlite").exists()
    assert final_digest(interrupted) == final_digest(straight)
    assert history(interrupted) == history(straight)


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
def test_a_journal_that_lost_its_end_trains_nothing_twice(
    runs: Runs, straight: Path, interrupted: Path, kept: float
) -> None:
    """SQLite itself passes silently over a log that was cut; the checkpoint knows how long it was."""
    log = interrupted / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[: int(log.stat().st_size * kept)])
    assert runs(interrupted, with_eta(0)) == 0, runs.said()
    assert final_digest(interrupted) == final_digest(straight)
    db = sqlite3.connect(interrupted / "journal.sqlite")
    assert db.execute("SELECT count(*) FROM groups WHERE state NOT IN ('trained','dropped')").fetchone() == (0,)
    assert db.execute("SELECT 1 FROM edges GROUP BY group_id, state HAVING count(*) > 1").fetchall() == []


def test_a_journal_that_is_gone_is_begun_anew_after_the_newest_checkpoint(
    runs: Runs, straight: Path, interrupted: Path
) -> None:
    for path in interrupted.glob("journal.sqlite*"):
        path.unlink()
    assert runs(interrupted, with_eta(0)) == 0, runs.said()
    assert "the file is missing): going on after step 6" in runs.said()
    assert final_digest(interrupted) == final_digest(straight)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "quintet-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can make a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (("quintet.train.checkpoint:save", 2, "before"), "no room on the disk for checkpoint step-6; step-3 is the"),
        (
            ("quintet.train.checkpoint:_save_tensors", 3, "after"),
            "for checkpoint step-6; step-3 is the newest whole one",
        ),
        (("quintet.buffer.journal:SqliteJournal._insert_rollouts", 30, "before"), "no room on the disk"),
    ],
    ids=["checkpoint", "half a checkpoint", "journal"],
)
def test_a_run_whose_disk_fills_says_so_and_goes_on_when_there_is_room(
    runs: Runs, straight: Path, small_disk: Path, at: tuple[str, int, str], said: str
) -> None:
    folder = small_disk / "run"
    assert runs(folder, with_eta(0), at, "fill disk") == 2, runs.said()
    assert said in runs.said()
    assert (folder / "checkpoints/step-3/manifest.json").exists()
    (small_disk / "ballast").unlink()
    assert runs(folder, with_eta(0)) == 0, runs.said()
    check_accounting(folder)
    assert final_digest(folder) == final_digest(straight)


def engines_of_this_process() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "rollout-engine"}


def test_the_disk_that_is_full_is_told_of_by_what_it_kept_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are closed on the way out want room too: what they raise must not hide the checkpoint that failed."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    closed: list[str] = []
    close = SqliteJournal.close
    engines_before = engines_of_this_process()
    monkeypatch.setattr("quintet.train.checkpoint._save_tensors", full)
    monkeypatch.setattr("quintet.observe.trace.ChromeTrace.close", full)
    monkeypatch.setattr("quintet.train.worker.LocalTrainWorker.close", full)
    monkeypatch.setattr(SqliteJournal, "close", lambda self: (close(self), closed.append("journal"), full()))
    with pytest.raises(QuintetError, match="no room on the disk for checkpoint step-3; there is no older one"):
        quintet.train(CONFIG, reward=low_digits, out=tmp_path / "run")
    assert closed, "one part that cannot be closed keeps no other from it"
    assert not engines_of_this_process() - engines_before


# -- stopping, going on, forking -----------------------------------------------------------------------


GRADE = "quintet.reward.service:LocalRewardService._grade"
# (what is going on, the signal, when it comes, the newest checkpoint afterwards): it is of the step before while no
# weight has changed, else of the step itself
STOPS: list[tuple[str, str, tuple[str, int, str], int]] = [
    ("generation", "interrupt", ("quintet.rollout.engine.engine:Engine.step", 20, "before"), 4),
    ("the first mini-batch", "interrupt", ("torch:Tensor.backward", 12, "before"), 4),
    ("a checkpoint being written", "terminate", ("quintet.train.checkpoint:_save_tensors", 4, "after"), 6),
    ("evaluation before the first step", "interrupt", (GRADE, 15, "before"), 0),
    ("scoring", "terminate", (GRADE, 30, "before"), 3),
    ("a batch being assigned", "interrupt", ("quintet.buffer.journal:SqliteJournal.assign", 5, "after"), 4),
    ("the second mini-batch", "terminate", ("torch:Tensor.backward", 13, "before"), 5),
    ("an optimizer step", "interrupt", ("quintet.train.optimizer:Optimizer.step", 12, "before"), 5),
]
STOP_CASES = [pytest.param(*stop, id=stop[0], marks=[pytest.mark.heavy] * (n > 2)) for n, stop in enumerate(STOPS)]


@pytest.mark.parametrize(("what", "act", "at", "steps"), STOP_CASES)
def test_the_first_signal_ends_the_run_with_a_checkpoint_and_a_report(
    runs: Runs, straight: Path, tmp_path: Path, what: str, act: str, at: tuple[str, int, str], steps: int
) -> None:
    folder = tmp_path / "run"
    assert runs(folder, with_eta(0), at, act) == 130
    assert "press Ctrl-C again to stop at once" in runs.said()
    assert max(int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*")) == steps
    assert json.loads((folder / "summary.json").read_text())["steps"] == steps
    assert f"not finished: {steps} of {STEPS} steps" in (folder / "report.html").read_text()
    assert runs(folder, with_eta(0)) == 0, runs.said()
    check_accounting(folder)
    assert final_digest(folder) == final_digest(straight)
    assert history(folder) == history(straight)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("torch:Tensor.backward", 13),
        pytest.param("quintet.rollout.engine.engine:Engine.step", 20, marks=pytest.mark.heavy),
        pytest.param("quintet.train.checkpoint:_save_tensors", 4, marks=pytest.mark.heavy),
    ],
)
def test_a_second_ctrl_c_ends_the_process_at_once_and_loses_nothing(
    runs: Runs, straight: Path, tmp_path: Path, function: str, call: int
) -> None:
    folder = tmp_path / "run"
    began = time.monotonic()
    assert runs(folder, with_eta(0), (function, call, "before"), "interrupt twice") == 130
    assert time.monotonic() - began < 30, "it waited for what was being computed"
    assert runs(folder, with_eta(0)) == 0, runs.said()
    check_accounting(folder)
    assert final_digest(folder) == final_digest(straight)


def test_schedule_randomness_data_and_dynamic_sampling_go_on_where_they_were(runs: Runs, tmp_path: Path) -> None:
    """CKP06, CKP08: 6 steps straight against 3 + stop + resume."""
    train = {"lr": 3e-3, "schedule": "cosine", "warmup_steps": 2, "old": "trainer", "mini_batches": 2}
    config = CONFIG | {"steps": 6, "algorithm": {"preset": "dapo"}, "train": train, "checkpoint": {"every": 2}}
    config |= {"rollout": CONFIG["rollout"] | {"group_size": 2}}
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert runs(whole, config) == 0
    assert runs(parted, config, ("quintet.train.optimizer:Optimizer.step", 5, "before"), "interrupt") == 130
    assert runs(parted, config) == 0
    assert final_digest(parted) == final_digest(whole)
    assert history(parted) == history(whole)
    rates = [row["actor/lr"] for row in history(whole) if row["step"] > 0]
    assert rates[-1] < rates[1] and sum(row.get("dropped/equal_rewards", 0) for row in history(whole)) > 0

    def samples(folder: Path) -> list[Any]:
        db = sqlite3.connect(folder / "journal.sqlite")
        order = "SELECT group_id, state, reason, step, position, admit_index FROM groups ORDER BY admit_index"
        return db.execute(order).fetchall()

    assert samples(parted) == samples(whole)


def test_a_finished_run_goes_on_when_it_is_given_more_steps(runs: Runs, straight: Path, tmp_path: Path) -> None:
    short = tmp_path / "run"
    assert runs(short, with_eta(0) | {"steps": 7}) == 0
    assert runs(short, with_eta(0)) == 0
    check_accounting(short)
    assert final_digest(short) == final_digest(straight)
    with pytest.raises(QuintetError, match="differs in steps"):
        quintet.train(with_eta(0) | {"steps": 7}, reward=low_digits, out=short)


def test_more_steps_are_refused_where_the_schedule_would_have_been_another(tmp_path: Path) -> None:
    config = CONFIG | {"steps": 1, "train": CONFIG["train"] | {"schedule": "linear"}, "data": CONFIG["data"]}
    quintet.train(config, reward=low_digits, out=tmp_path / "run")
    with pytest.raises(QuintetError, match="differs in steps"):
        quintet.train(config | {"steps": 2}, reward=low_digits, out=tmp_path / "run")


def test_a_fork_starts_a_new_run_from_the_newest_weights_and_leaves_the_old_one_alone(
    runs: Runs, interrupted: Path
) -> None:
    """CKP09: the schedule of the new run begins at its own first step."""

    def tree() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(interrupted.rglob("*")) if p.is_file() and p.suffix != ".lock"}

    before = tree()
    config = with_eta(0) | {"steps": 2, "train": {"lr": 0.5, "schedule": "linear"}}
    said: list[str] = []
    new = api.fork(config, interrupted, say=said.append)
    assert new == interrupted.with_name("run-fork1") and str(new) in said[0] and "after step 7" in said[0]
    assert {k: v for k, v in tree().items() if not k.endswith("-shm")} == {
        k: v for k, v in before.items() if not k.endswith("-shm")
    }
    recorded = sqlite3.connect(interrupted / "journal.sqlite").execute("SELECT digest FROM versions WHERE version=7")
    (digest,) = recorded.fetchone()
    assert json.loads((new / "fork.json").read_text()) == {"run": str(interrupted), "step": 7, "digest": digest}
    assert runs(new, config) == 0, runs.said()
    first = sqlite3.connect(new / "journal.sqlite").execute("SELECT digest FROM versions WHERE version=0").fetchone()
    assert first == (digest,)
    assert [row["actor/lr"] for row in history(new) if row["step"] == 1] == [0.5]
    assert api.fork(config, interrupted, say=said.append).name == "run-fork2"
    other = config | {"model": {"name": "builtin:tiny", "tiny": {"hidden_size": 64}}}
    with pytest.raises(QuintetError, match=r"model\.tiny"):
        api.fork(other, interrupted)


# -- replay --------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the runs: the number of threads decides the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("eta", [0, 2])
def test_replay_of_five_random_steps_gives_the_recorded_digest(
    runs: Runs, tmp_path: Path, one_thread: None, eta: int
) -> None:
    folder = tmp_path / "run"
    assert runs(folder, with_eta(eta)) == 0
    seed = random.randrange(10**6)
    chosen = random.Random(seed).sample(range(1, STEPS), 5)
    for step in (0, *chosen, STEPS):
        found = asyncio.run(replay(RunFolder(folder), step))
        assert found.equal and found.digest == found.recorded, f"step {step} of {chosen} (seed {seed})"
        assert found.from_step == (step // 3 * 3 if step >= 9 else 0)  # the two newest checkpoints are kept
    with pytest.raises(QuintetError, match="no step 13"):
        asyncio.run(replay(RunFolder(folder), 13))


def test_inspection_shows_each_token_and_adds_up(straight: Path, one_thread: None) -> None:
    found = asyncio.run(replay(RunFolder(straight), 4, inspect=True))
    assert found.equal and found.inspection is not None
    inspection = found.inspection
    assert len(inspection.samples) == GROUPS * SAMPLES and len(inspection.gradient_norms) == 2
    norms = [math.sqrt(sum(n * n for n in step.values())) for step in inspection.gradient_norms]
    assert sum(norms) / 2 == pytest.approx(inspection.metrics["actor/grad_norm"], rel=1e-5)
    assert {"layers.0", "layers.1", "embed_tokens", "norm"} <= inspection.gradient_norms[0].keys()
    for sample in inspection.samples:
        assert all(t.ratio == pytest.approx(1.0, abs=1e-5) for t in sample.tokens)
        assert all(t.logprob == pytest.approx(t.sampler, abs=1e-4) for t in sample.tokens if t.trained)
        assert all(t.loss == pytest.approx(-t.advantage, abs=1e-4) for t in sample.tokens if t.trained)
    first = inspection.samples[: GROUPS * SAMPLES // 2]
    assert sum(s.loss for s in first) == pytest.approx(0.0, abs=1e-4)  # advantages of a group add up to 0


def test_the_replay_command_prints_digests_tables_and_json(straight: Path, one_thread: None) -> None:
    run = CliRunner()
    plain = run.invoke(app, ["replay", str(straight), "--step", "4", "--inspect"])
    assert plain.exit_code == 0, plain.output
    digest = JournalReader.open(straight / "journal.sqlite").digests()[4]
    assert plain.output.count(digest) == 2 and "\nequal\n" in plain.output
    assert "layers.1" in plain.output and plain.output.count("advantage") >= GROUPS * SAMPLES
    found = json.loads(run.invoke(app, ["replay", str(straight), "--step", "4", "--inspect", "--json"]).output)
    assert found["equal"] and found["digest"] == found["recorded"] == digest
    assert len(found["inspection"]["samples"][0]["tokens"]) <= 3


def test_a_replay_that_comes_out_different_says_what_differs(runs: Runs, straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    with SqliteJournal(folder / "journal.sqlite") as journal:
        journal.version(2, 2, "another")
        journal.environment({"threads": 99})
    shown = CliRunner().invoke(app, ["replay", str(folder), "--step", "2"])
    assert shown.exit_code == 1 and "DIFFERENT" in shown.output and "threads: 99 then" in shown.output


def test_pruned_trajectories_cannot_be_replayed_and_the_run_can_still_be_resumed(
    runs: Runs, straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = with_eta(0) | {"checkpoint": {"every": 3, "keep_trajectories_steps": 2}}
    assert runs(folder, config, ("quintet.buffer.journal:SqliteJournal.assign", 11, "after")) == -9
    assert runs(folder, config) == 0, runs.said()
    assert final_digest(folder) == final_digest(straight)
    db = sqlite3.connect(folder / "journal.sqlite")
    kept = db.execute("SELECT DISTINCT step FROM groups JOIN trajectories USING (group_id) ORDER BY step").fetchall()
    assert kept == [(10,), (11,), (12,)]  # the older of the two kept checkpoints is step 9
    with pytest.raises(QuintetError, match="trajectories of steps up to 9 were deleted"):
        asyncio.run(replay(RunFolder(folder), 4))


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.0, 0.0, 0.1, 0.7, 0.3, 0.7, 0.2, 0.1])  # untrained, before, steps 1 to 5, after

    async def evaluated(*args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval/n": 8.0, "eval/accuracy": next(accuracies)}

    monkeypatch.setattr("quintet.cluster.local.evaluate_all", evaluated)
    config = CONFIG | {"steps": 6, "eval": {"every": 1}}
    config |= {"checkpoint": {"every": 0, "keep_last": 1, "keep_best": True}}
    quintet.train(config, reward=low_digits, out=tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    assert sorted(p.name for p in checkpoints.glob("step-*")) == ["step-2", "step-6"]
    assert json.loads((checkpoints / "best.json").read_text()) == {"step": 2, "accuracy": 0.7}

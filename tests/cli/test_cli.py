"""The command line: what it offers, how it refuses, what it passes on. No model is loaded here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from quintet import __version__
from quintet.cli.main import app, main
from quintet.config import RunConfig
from quintet.types import FinishReason, GroupId, QuintetError, Rollout

runner = CliRunner()

# The flags of every command. A change here is a change of the command line, and is meant.
FLAGS = {
    "train": {"--set", "--out", "--fork"},
    "sft": {"--set", "--out"},
    "eval": {"--set", "--checkpoint"},
    "generate": {"--set", "--checkpoint", "--n", "--json"},
    "algorithms": {"--json"},
    "report": {"--out"},
    "check": {"--set", "--out"},
    "replay": {"--step", "--inspect", "--json"},
    "config": {"--set", "--defaults"},
    "serve gateway": {"--model", "--port", "--host", "--set"},
    "serve rollout": {
        "--model",
        "--port",
        "--host",
        "--weights-root",
        "--weights-stream",
        "--role",
        "--prefill-url",
        "--set",
    },
    "grade math": {"--json", "--unboxed", "--second-opinion"},
    "grade code": {"--json", "--timeout-s", "--set"},
    "serve sandbox": {"--port", "--host", "--max-requests", "--set"},
    "serve reward": {"--fn", "--port", "--host", "--max-requests", "--max-samples", "--set"},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text("steps: 3\nlog: {console: plain}\n")
    return path


def fail_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[Any, str]:
    """Exit code and stderr of the process's entry point."""
    monkeypatch.setattr(sys, "argv", ["quintet", *args])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr().err


def use_api(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    monkeypatch.setitem(sys.modules, "quintet.api", SimpleNamespace(**functions))
    monkeypatch.setattr("quintet.api", sys.modules["quintet.api"], raising=False)


def test_the_flags_are_these() -> None:
    import typer.main

    def flags(group: Any, above: str = "") -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                found |= flags(command, f"{above}{name} ")
            else:
                options = (o for p in command.params for o in p.opts if o.startswith("--"))
                found[above + name] = set(options) - {"--help"}
        return found

    assert flags(typer.main.get_command(app)) == FLAGS


@pytest.mark.parametrize("command", sorted(FLAGS))
def test_every_command_has_help_with_an_example(command: str) -> None:
    shown = runner.invoke(app, [*command.split(), "--help"])
    assert shown.exit_code == 0 and f"quintet {command} " in shown.output and "Examples" in shown.output


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output == f"quintet {__version__}\n"


def test_algorithms_prints_every_preset_with_paper_and_cells() -> None:
    from quintet.algorithms.presets import OFFLINE_PRESETS, PRESETS

    shown = runner.invoke(app, ["algorithms"]).output
    lines = {cells[1]: cells for line in shown.splitlines() if len(cells := [c.strip() for c in line.split("│")]) > 3}
    assert set(PRESETS) | set(OFFLINE_PRESETS) <= lines.keys()
    assert lines["dapo"][2:6] == ["arXiv:2503.14476", "grpo", "ppo (eps_high 0.28)", "token-mean"]
    assert lines["ipo"][2:4] == ["arXiv:2310.12036", "dpo (loss ipo)"]


def test_algorithms_as_json_has_every_parameter() -> None:
    rows = {row["preset"]: row for row in json.loads(runner.invoke(app, ["algorithms", "--json"]).output)}
    assert rows["grpo"]["advantage"]["params"]["eps"] == 1e-8
    assert rows["ppo"]["advantage"] == {
        "name": "gae", "params": {"gamma": 1.0, "lam": 0.95, "whiten": True, "bootstrap": False}
    }  # fmt: skip
    assert rows["robust_dpo"]["objective"]["params"]["label_smoothing"] == 0.1


def test_config_prints_the_resolved_tree(recipe: Path) -> None:
    shown = runner.invoke(app, ["config", str(recipe), "--set", "train.lr=1e-5"])
    tree = yaml.safe_load(shown.output)
    assert (tree["name"], tree["steps"], tree["train"]["lr"]) == ("small", 3, 1e-5)
    assert RunConfig.model_validate(tree).rollout.group_size == RunConfig().rollout.group_size


def test_config_defaults_name_every_section() -> None:
    shown = runner.invoke(app, ["config", "--defaults"])
    assert set(yaml.safe_load(shown.output)) == set(RunConfig.model_fields)


@pytest.mark.parametrize("args", [["config"], ["config", "x.yaml", "--defaults"]])
def test_config_wants_one_of_the_two(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail_with(monkeypatch, capsys, *args) == (2, "quintet: quintet config wants either a RECIPE or --defaults\n")


@pytest.mark.parametrize("command", ["train", "sft", "eval", "config"])
def test_a_wrong_recipe_is_one_message_and_exit_code_2(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("stps: 3\n")
    code, err = fail_with(monkeypatch, capsys, command, str(path))
    assert (code, err) == (2, f"quintet: {path}:1: unknown key 'stps'; did you mean 'steps'?\n")


def test_an_unwritable_run_folder_is_refused_before_anything_loads(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    use_api(monkeypatch)  # nothing in it: touching it would raise AttributeError
    code, err = fail_with(monkeypatch, capsys, "train", str(recipe), "--out", str(tmp_path / "file" / "run"))
    assert code == 2 and "cannot write the run folder" in err and "--out" in err


def test_a_real_process_shows_no_traceback_for_a_users_mistake(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quintet.cli.main", "train", str(tmp_path / "absent.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"quintet: {tmp_path / 'absent.yaml'}: no such recipe file\n"


def test_train_passes_config_folder_and_events(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def train(config: RunConfig, **options: Any) -> SimpleNamespace:
        seen.update(options, config=config)
        options["on_event"]("message", {"level": "info", "text": "hello from the run"})
        return SimpleNamespace(folder=options["out"], summary={})

    use_api(monkeypatch, train=train)
    done = runner.invoke(app, ["train", str(recipe), "--out", str(tmp_path / "run"), "--set", "seed=4"])
    assert done.exit_code == 0, done.output
    assert (seen["config"].seed, seen["out"], seen["handle_signals"]) == (4, tmp_path / "run", True)
    assert done.output.splitlines() == [
        "hello from the run",
        f"run folder: {tmp_path / 'run'}",
        f"report:     {tmp_path / 'run' / 'report.html'}",
    ]


def test_ctrl_c_ends_with_130_and_the_command_that_resumes(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: RunConfig, **options: Any) -> None:
        raise KeyboardInterrupt

    use_api(monkeypatch, train=train)
    out = tmp_path / "my run"
    code, err = fail_with(monkeypatch, capsys, "train", str(recipe), "--set", "seed=4", "--out", str(out))
    assert (code, err) == (130, f"stopped; resume with: quintet train {recipe} --set seed=4 --out '{out}'\n")


def test_a_run_that_cannot_go_on_says_how_to_resume(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quintet.controller.controller import RunFailed

    def train(config: RunConfig, **options: Any) -> None:
        raise RunFailed("too many failures")

    use_api(monkeypatch, train=train)
    code, err = fail_with(monkeypatch, capsys, "train", str(recipe), "--out", str(tmp_path / "run"))
    assert code == 2
    assert err.splitlines() == [
        f"resume with: quintet train {recipe} --out {tmp_path / 'run'}",
        "quintet: too many failures",
    ]


def test_our_own_mistakes_keep_their_traceback(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(config: RunConfig, **options: Any) -> None:
        raise ZeroDivisionError("ours")

    use_api(monkeypatch, train=train)
    monkeypatch.setattr(sys, "argv", ["quintet", "train", str(recipe), "--out", str(tmp_path / "run")])
    with pytest.raises(ZeroDivisionError, match="ours"):
        main()


def test_eval_prints_json_on_stdout_and_progress_on_stderr(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(config: RunConfig, *, checkpoint: str | None, on_event: Any) -> dict[str, float]:
        on_event("message", {"level": "info", "text": f"checkpoint {checkpoint}"})
        return {"eval/accuracy": 0.5}

    use_api(monkeypatch, evaluate=evaluate)
    done = runner.invoke(app, ["eval", str(recipe), "--checkpoint", "runs/x/final"])
    assert json.loads(done.stdout) == {"eval/accuracy": 0.5}
    assert done.stderr == "checkpoint runs/x/final\n"


def a_rollout(text: str) -> Rollout:
    return Rollout(GroupId("p"), 0, [1], [2, 3], text, [-0.5, -0.25], [1, 1], [], FinishReason.STOP)


def test_generate_passes_prompts_and_prints_answers(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def generate(config: RunConfig, prompts: list[str], *, checkpoint: str | None, on_event: Any) -> list[Rollout]:
        seen.update(n=config.rollout.group_size, t=config.rollout.temperature, prompts=prompts)
        return [a_rollout("四"), a_rollout("5")]

    use_api(monkeypatch, generate=generate)
    done = runner.invoke(app, ["generate", str(recipe), "2+2=", "2+3=", "--n", "1", "--set", "rollout.temperature=0"])
    assert (done.exit_code, done.stdout) == (0, "四\n5\n")
    assert seen == {"n": 1, "t": 0, "prompts": ["2+2=", "2+3="]}
    lines = runner.invoke(app, ["generate", str(recipe), "-", "--json"], input="a\nb\n").stdout.splitlines()
    assert seen["prompts"] == ["a", "b"]
    assert json.loads(lines[0]) == {
        "group": "p/e0.o0.a0", "sample": 0, "text": "四", "finish_reason": "stop",
        "response_ids": [2, 3], "logprobs": [-0.5, -0.25],
    }  # fmt: skip


def test_generate_without_a_prompt_is_refused(recipe: Path) -> None:
    done = runner.invoke(app, ["generate", str(recipe)])
    assert isinstance(done.exception, QuintetError) and "no prompt given" in str(done.exception)

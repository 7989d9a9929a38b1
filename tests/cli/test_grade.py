"""`quintet grade`: verdicts with reasons, misses, counts, exit codes, complaints that name the line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quintet.cli.main import app, main

runner = CliRunner()
PROCESS = ["--set", "sandbox.backend=process", "--set", "sandbox.workers=1"]

PAIRS: list[dict[str, Any]] = [
    {"gold": "1/2", "answer": "0.5", "expect": True},
    {"gold": "7", "answer": r"so it is \boxed{8}", "form": "response", "expect": False},
    {"gold": "7", "answer": "8", "expect": True},
]
ADD = "def add(a, b):\n    return a + b"
PROGRAMS: list[dict[str, Any]] = [
    {"code": ADD, "tests": ["assert add(1, 2) == 3"], "expect": True},
    {"response": f"Here:\n```python\n{ADD}\n```", "tests": "assert add(1, 2) == 3", "expect": True},
    {"code": "print(input())", "tests": [{"input": "a", "output": "b"}], "expect": False},
    {"code": ADD, "tests": ["assert 1 == 1"], "expect": False},
]


def file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_math_verdicts_misses_and_counts(tmp_path: Path) -> None:
    path = file(tmp_path, PAIRS)
    shown = runner.invoke(app, ["grade", "math", path])
    lines = shown.stdout.splitlines()
    assert lines[0] == f"{path}:1  right  equal in value"
    assert lines[1].startswith(f"{path}:2  wrong  ") and "MISS" not in lines[1]
    assert lines[2].endswith("MISS, expected right")
    misses = lines[lines.index("misses:") + 1 :]
    assert misses[0].strip() == lines[2] and json.loads(misses[1]) == {"gold": "7", "answer": "8"}
    assert "median" in lines[-2] and lines[-2].startswith("1 right, 2 wrong in ")
    assert lines[-1] == "2 passed, 1 failed" and shown.exit_code == 1


def test_without_expectations_nothing_can_be_missed(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "expect"} for row in PAIRS]
    shown = runner.invoke(app, ["grade", "math", file(tmp_path, rows)])
    assert shown.exit_code == 0 and "passed" not in shown.stdout and "MISS" not in shown.stdout


def test_code_verdicts_as_json(tmp_path: Path) -> None:
    path = file(tmp_path, PROGRAMS)
    shown = runner.invoke(app, ["grade", "code", path, "--json", *PROCESS])
    told = json.loads(shown.stdout)
    assert (told["right"], told["wrong"], told["passed"], told["failed"]) == (2, 2, 4, 0) and shown.exit_code == 0
    assert [row["right"] for row in told["rows"]] == [True, True, False, False]
    assert told["rows"][0] == {
        "row": f"{path}:1", "right": True, "reason": "1 of 1 tests", "expect": True, "passed": True,
    }  # fmt: skip
    assert told["rows"][2]["reason"] == "input 'a': printed 'a\\n', expected 'b'"
    assert "calls no function of the candidate" in told["rows"][3]["reason"]


@pytest.mark.parametrize(
    ("command", "row", "said"),
    [
        ("math", {"gold": "1"}, "`gold` and `answer` must be texts"),
        ("math", {"gold": "1", "answer": "1", "form": "essay"}, "`form` is 'essay'"),
        ("math", {"gold": "1", "answer": "1", "expect": "yes"}, "`expect` is 'yes'"),
        ("code", {"tests": []}, "a text in `code` (a program) or in `response`"),
        ("code", {"code": "x", "response": "y", "tests": []}, "a text in `code` (a program) or in `response`"),
        ("code", {"code": "x"}, "it needs `tests`"),
        ("code", {"code": "x", "tests": "nothing"}, "neither JSON"),
        ("code", {"code": "x", "tests": [], "expect": 1}, "`expect` is 1"),
    ],
)
def test_a_bad_row_is_named_by_its_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    row: dict[str, Any],
    said: str,
) -> None:
    first = PAIRS[0] if command == "math" else PROGRAMS[0]
    path = file(tmp_path, [first, row])
    words = PROCESS if command == "code" else []
    monkeypatch.setattr(sys, "argv", ["quintet", "grade", command, path, *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith(f"quintet: {path}:2: ") and said in error


def test_a_wrong_option_of_the_reward_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quintet", "grade", "code", file(tmp_path, PROGRAMS), "--set", "partail=true"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and "option `partail`" in capsys.readouterr().err


def test_progress_is_shown_once_it_takes_longer_than_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.cli.grade.PATIENCE_S", 0.0)
    shown = runner.invoke(app, ["grade", "math", file(tmp_path, PAIRS)])
    assert "graded 1 of 3" in shown.stderr and "graded" not in shown.stdout
    monkeypatch.setattr("quintet.cli.grade.PATIENCE_S", 60.0)
    assert "graded" not in runner.invoke(app, ["grade", "math", file(tmp_path, PAIRS)]).stderr

"""Sessions: an interpreter and a folder that live on, are captured, multiplied and taken up again elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quintet.sandbox.protocol import Limits, Outcome, SandboxFailure
from quintet.sandbox.snapshot import describe
from quintet.types import QuintetError
from tests.sandbox.boxes import Box, assert_sound, within

STATE = '''
import collections, math, random
from dataclasses import dataclass

@dataclass
class Point:
    x: int
    def norm(self):
        return math.hypot(self.x, height)

height = 4
point = Point(3)
same = point
count = 0

def bump():
    """Changes a variable of the session."""
    global count
    count += 1
    return count

def counter():
    c = 0
    def next_one():
        nonlocal c
        c += 1
        return c
    return next_one

tick = counter()
tick()
square = lambda x: x * x * height
words = collections.Counter("aab")
random.seed(5)
open("notes.txt", "w").write("hello")
'''
LOOK = (
    "bump()", "count", "tick()", "point.norm()", "same is point", "isinstance(point, Point)", "square(2)", "words['a']",
    "open('notes.txt').read()", "random.random()",
)  # fmt: skip
SEEN = [1, 1, 2, 5.0, True, True, 16, 2, "hello", 0.6229016948897019]


def session(box: Box) -> str:
    return box.wait(box.sandbox.create())


def look(box: Box, name: str, *expressions: str) -> list[Any]:
    values = box.run("", session=name, expressions=expressions).values
    assert all(value.error is None for value in values), values
    return [value.value for value in values]


def test_variables_files_and_imports_live_on(box: Box) -> None:
    name = session(box)
    assert box.run(STATE, session=name).outcome is Outcome.FINISHED
    assert look(box, name, *LOOK) == SEEN
    assert look(box, name, "bump()") == [2]


def test_each_run_has_its_own_input_and_output(box: Box) -> None:
    name = session(box)
    assert box.run("print(input())", session=name, stdin="one\nleft over").stdout == "one\n"
    assert box.run("print(input())", session=name, stdin="two").stdout == "two\n"


@pytest.mark.parametrize("code", ["1 / 0", "f(", "import sys; sys.exit(2)", "raise KeyboardInterrupt"])
def test_a_session_survives_errors_and_exits(box: Box, code: str) -> None:
    name = session(box)
    box.run("x = 1", session=name)
    assert box.run(f"x = 2\n{code}" if code != "f(" else code, session=name).outcome is not Outcome.FINISHED
    assert look(box, name, "x") == [1 if code == "f(" else 2]


def test_an_error_shows_the_line_of_its_cell(box: Box) -> None:
    name = session(box)
    box.run("def f():\n    return 1 / 0", session=name)
    stderr = box.run("\nf()", session=name).stderr
    assert 'File "<cell 2>", line 2' in stderr and 'File "<cell 1>", line 2, in f\n    return 1 / 0' in stderr


@pytest.mark.parametrize(
    ("code", "limits", "outcome"),
    [
        ("while True: pass", within(cpu_s=0.2), Outcome.CPU_TIME),
        ("import time; time.sleep(60)", within(wall_s=0.3), Outcome.WALL_TIME),
        ("import os; os._exit(0)", within(), Outcome.EXITED),
        ("import ctypes; ctypes.string_at(0)", within(), Outcome.CRASHED),
    ],
)
def test_any_other_end_is_the_sessions_end(box: Box, code: str, limits: Limits, outcome: Outcome) -> None:
    name = session(box)
    assert box.run(code, session=name, limits=limits).outcome is outcome
    with pytest.raises(SandboxFailure, match="ended") as caught:
        box.run("1", session=name)
    assert not caught.value.retryable


def test_times_are_counted_per_run(box: Box) -> None:
    name = session(box)
    code = "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass"
    outcomes = {box.run(code, session=name, limits=within(cpu_s=0.25)).outcome for _ in range(3)}
    assert outcomes == {Outcome.FINISHED}


def test_forked_sixteen_ways_each_goes_on_alone(box: Box) -> None:
    name = session(box)
    box.run(STATE, session=name)
    forks = box.wait(box.sandbox.fork(name, 16))
    assert len(set(forks)) == 16
    for i, fork in enumerate(forks):
        change = f"height = {i}\npoint.x = 0\nopen('notes.txt', 'a').write(' {i}')\nfor _ in range({i}): bump()"
        assert box.run(change, session=fork).outcome is Outcome.FINISHED
    seen = [
        look(box, f, "height", "point.norm()", "same.x", "open('notes.txt').read()", "count", "square(1)")
        for f in forks
    ]
    assert seen == [[i, float(i), 0, f"hello {i}", i, i] for i in range(16)]
    assert look(box, name, *LOOK) == SEEN  # the first one is as it was


ELSEWHERE = """
import asyncio, json, sys
from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.factory import make_sandbox
from quintet.sandbox.protocol import Limits, Program

async def main():
    sandbox = make_sandbox(SandboxConfig(backend=sys.argv[1], workers=1))
    session = await sandbox.restore(open(sys.argv[2], "rb").read())
    program = Program("bump()", expressions=tuple(json.loads(sys.argv[3])))
    result = await sandbox.run(program, Limits(wall_s=20), session)
    print(json.dumps([value.value for value in result.values]))
    await sandbox.close()

asyncio.run(main())
"""


def test_a_suspended_session_is_finished_by_another_process(box: Box, tmp_path: Path) -> None:
    name = session(box)
    box.run(STATE + "bump()", session=name)
    (tmp_path / "snapshot").write_bytes(box.wait(box.sandbox.snapshot(name)))
    box.wait(box.sandbox.destroy(name))
    expressions = json.dumps(["count", "point.norm()", "tick()", "open('notes.txt').read()"])
    command = [sys.executable, "-c", ELSEWHERE, box.backend, str(tmp_path / "snapshot"), expressions]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [2, 5.0, 2, "hello"]


def test_what_cannot_be_captured_is_left_out_and_named(box: Box) -> None:
    name = session(box)
    code = "lines = (i for i in range(3))\nfile = open('a', 'w')\nfile.write('x'); file.flush()\nx = 1\n"
    code += "def read(): return file.name"
    box.run(code, session=name)
    snapshot = box.wait(box.sandbox.snapshot(name))
    info = describe(snapshot)
    assert set(info.missing) == {"lines", "file"}
    assert "generator" in info.missing["lines"]
    assert info.files == {"a": 1}
    again = box.wait(box.sandbox.restore(snapshot))
    values = box.run("", session=again, expressions=("x", "lines", "read()")).values
    assert values[0].value == 1
    assert [value.error for value in values[1:]] == [f"NameError: name '{v}' is not defined" for v in ("lines", "file")]


def test_a_restored_session_is_as_locked_as_any(jail: Box) -> None:
    name = session(jail)
    jail.run(
        "class Bomb:\n    def __reduce__(self): return (__import__('socket').socket, ())\nbomb = Bomb()", session=name
    )
    snapshot = jail.wait(jail.sandbox.snapshot(name))
    with pytest.raises(SandboxFailure, match="PermissionError"):
        jail.wait(jail.sandbox.restore(snapshot))
    assert_sound(jail)


def test_links_are_not_followed_into_a_snapshot(box: Box, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("42")
    name = session(box)
    box.run(f"import os\nos.symlink({str(tmp_path)!r}, 'folder')\nos.symlink('/etc/hostname', 'file')", session=name)
    assert describe(box.wait(box.sandbox.snapshot(name))).files == {}


def test_a_snapshot_that_is_too_large_is_refused(box: Box) -> None:
    name = session(box)
    box.run("import os\nx = os.urandom(70 << 20)", session=name)
    with pytest.raises(SandboxFailure, match=r"cannot be captured.*too large") as caught:
        box.wait(box.sandbox.snapshot(name))
    assert not caught.value.retryable
    assert look(box, name, "len(x)") == [70 << 20]


def test_what_is_no_snapshot_is_refused(box: Box) -> None:
    with pytest.raises(QuintetError, match="not a snapshot"):
        box.wait(box.sandbox.restore(b"cos\nsystem\n(S'true'\ntR."))


def test_a_destroyed_session_is_gone(box: Box) -> None:
    name = session(box)
    box.wait(box.sandbox.destroy(name))
    box.wait(box.sandbox.destroy(name))  # harmless
    with pytest.raises(SandboxFailure, match="there is no session"):
        box.run("1", session=name)

"""What candidates try for a reward or for harm: nothing comes of it. `test_walls.py` has what they try to reach.

The last test looks at what all the others left behind.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quintet.sandbox.pool import _result
from quintet.sandbox.protocol import Call, Outcome, Program, RunResult, Value
from tests.sandbox.boxes import LIMITS, RIGHT, Box, assert_nothing_left, assert_sound, make_box, within


@pytest.fixture(scope="module", params=["process", "namespace"])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """Of this file alone: what is left behind is looked for in it."""
    box = make_box(request.param, workers=2)
    yield box
    box.close()


@pytest.fixture(scope="module")
def jail() -> Iterator[Box]:
    box = make_box("namespace", workers=2)
    yield box
    box.close()


# What must end


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("while True: pass", Outcome.CPU_TIME),
        ("9**9**9", Outcome.CPU_TIME),
        ("import sys\nsys.set_int_max_str_digits(0)\nstr(1 << 30_000_000)", Outcome.CPU_TIME),
        ("import re; re.match('(a+)+b', 'a' * 60)", Outcome.CPU_TIME),
        ("import time; time.sleep(60)", Outcome.WALL_TIME),
        ("import os; os.read(os.pipe()[0], 1)", Outcome.WALL_TIME),
        ("import signal; signal.pause()", Outcome.WALL_TIME),
    ],
)
def test_endless_programs_end_at_the_limit(box: Box, code: str, outcome: Outcome) -> None:
    limits = within(wall_s=0.5, cpu_s=5) if outcome is Outcome.WALL_TIME else within(wall_s=30, cpu_s=0.3)
    started = time.monotonic()
    result = box.run(code, limits=limits)
    assert result.outcome is outcome
    assert time.monotonic() - started < 15
    assert_sound(box)


def test_signals_do_not_keep_a_program_alive(box: Box) -> None:
    code = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    try:
        while True: pass
    except BaseException: pass
"""
    assert box.run(code, limits=within(cpu_s=0.3)).outcome is Outcome.CPU_TIME
    assert_sound(box)


@pytest.mark.parametrize(
    "code",
    [
        "x = 'x' * 10**10",
        "x = []\nwhile True: x.append(bytearray(10**7))",
        "x = {}\nfor i in range(10**9): x[i] = str(i) * 50",
        "import mmap\nx = [mmap.mmap(-1, 10**8) for _ in range(1000)]",
    ],
)
def test_a_memory_bomb_ends(box: Box, code: str) -> None:
    result = box.run(code, limits=within(memory_mb=128))
    assert result.outcome in (Outcome.MEMORY, Outcome.ERROR)  # mmap says OSError
    assert result.outcome is Outcome.MEMORY or "Cannot allocate memory" in result.stderr
    assert_sound(box)


@pytest.mark.parametrize(
    "code",
    [
        "while True: print('x' * 1000)",
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        "import os\nwhile True:\n    try: os.write(1, b'x' * 100000)\n    except OSError: break",
        "import os\nos.ftruncate(1, 5_000_000)",
        "import os\nprint('x' * 600_000)\nos.write(2, b'y' * 600_000)",
    ],
)
def test_an_output_flood_is_cut(box: Box, code: str) -> None:
    result = box.run(code)
    assert result.outcome is Outcome.OUTPUT
    assert len(result.stdout) <= 1_000_000 and len(result.stderr) <= 1_000_000
    assert_sound(box)


def test_a_fork_bomb_starts_nothing(jail: Box) -> None:
    bomb = "import os\nwhile True: os.fork()"
    result = jail.run(bomb)
    assert (result.outcome, "PermissionError" in result.stderr) == (Outcome.ERROR, True)
    threads = "import threading\nwhile True: threading.Thread(target=threading.Event().wait).start()"
    assert jail.run(threads).outcome is Outcome.ERROR
    assert_sound(jail)


def test_a_fork_bomb_that_may_fork_stays_within_its_number_and_dies_with_it(jail: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root the kernel counts the processes of all programs together")
    code = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        children += 1
except BlockingIOError:
    print(children)
"""
    result = jail.run(code, limits=within(processes=6))
    assert (result.outcome, result.stdout) == (Outcome.FINISHED, "5\n")
    assert_sound(jail)


def test_two_jails_do_not_share_users_and_so_not_their_number_of_processes(jail: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root the kernel counts the processes of all programs together")
    users = "import os\nprint(os.getuid())"
    others = [make_box("namespace") for _ in range(2)]
    try:
        first = [int(box.run(users).stdout) for box in (jail, *others)]
    finally:
        for box in others:
            box.close()
    assert all(abs(a - b) > 20 for i, a in enumerate(first) for b in first[:i]), first


def test_the_disk_cannot_be_filled(jail: Box) -> None:
    code = """
import os
written = 0
try:
    for i in range(100):
        with open(str(i), "wb") as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    print(error.errno)
print(written <= 4 << 20)
files = 0
try:
    while True:
        os.symlink("x", f"link{files}"); files += 1
except OSError as error:
    print(error.errno, files < 5000)
"""
    assert jail.run(code, limits=within(scratch_mb=4)).stdout == "28\nTrue\n28 True\n"
    room = "open('a', 'wb').write(bytes(3 << 20)); print('room')"
    assert [jail.run(room, limits=within(scratch_mb=4)).stdout for _ in range(3)] == ["room\n"] * 3


def test_a_large_file_is_refused_by_the_process_back_end_too(box: Box) -> None:
    code = "f = open('a', 'wb')\nfor _ in range(100): f.write(bytes(1 << 20))"
    result = box.run(code, limits=within(scratch_mb=4))
    assert result.outcome is Outcome.ERROR
    assert "File too large" in result.stderr or "No space left" in result.stderr


def test_deep_recursion_hurts_nobody_else(box: Box) -> None:
    plain = box.run("def f(n): return f(n + 1)\nf(0)")
    assert (plain.outcome, "RecursionError" in plain.stderr) == (Outcome.ERROR, True)
    through_c = (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())"
    )
    assert box.run(through_c).outcome in (Outcome.CRASHED, Outcome.MEMORY)
    honest = (
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(50_000))"
    )
    assert box.run(honest).stdout == "50000\n"
    assert_sound(box)


def test_a_huge_integer_to_string_is_an_error_or_takes_its_own_time(box: Box) -> None:
    result = box.run("print(10**5000)")
    assert (result.outcome, "ValueError" in result.stderr) == (Outcome.ERROR, True)
    value = box.run("", expressions=("10**5000",)).values[0].value
    assert value == 10**5000


def test_the_parent_cannot_be_killed(jail: Box) -> None:
    code = """
import os, signal
for pid in (os.getppid(), 1, 0, -1, *range(2, 3000)):
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        try: os.kill(pid, number)
        except OSError: pass
print("still here")
"""
    before = [zygote._process.pid for zygote in jail.sandbox._zygotes]  # type: ignore[attr-defined]
    assert jail.run(code).stdout == "still here\n"
    assert_sound(jail)
    assert [zygote._process.pid for zygote in jail.sandbox._zygotes] == before  # type: ignore[attr-defined]


# What must earn nothing


@pytest.mark.parametrize(
    "ending",
    [
        "import sys; sys.exit(0)",
        "exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import ctypes; ctypes.CDLL(None).exit(0)",
        "import ctypes; ctypes.CDLL(None).syscall(231, 0)",
    ],
)
def test_an_early_exit_is_no_end(box: Box, ending: str) -> None:
    result = box.run(RIGHT + "\n" + ending, calls=(Call("f", (1,)),))
    assert (result.outcome, result.values) == (Outcome.EXITED, ())
    during_call = box.run(f"def f(x): {ending}", calls=(Call("f", (1,)), Call("f", (2,))))
    assert all(value.value is None and value.error for value in during_call.values)


EQUAL_TO_ALL = """
class Yes({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __reduce__(self): return (print, ("pickled",))
    def __bool__(self): return True
def f(x): return Yes()
"""


@pytest.mark.parametrize(("base", "value"), [("int", 0), ("str", ""), ("list", []), ("dict", {}), ("float", 0.0)])
def test_an_object_equal_to_everything_arrives_as_what_it_is(box: Box, base: str, value: Any) -> None:
    got = box.run(EQUAL_TO_ALL.format(base=base), calls=(Call("f", (1,)),)).values[0]
    assert (type(got.value), got.value, got.error) == (type(value), value, None)


def test_an_object_of_no_kind_is_not_data(box: Box) -> None:
    got = box.run(EQUAL_TO_ALL.format(base="object"), calls=(Call("f", (1,)),)).values[0]
    assert got == Value(error="not data: Yes is not plain data")


def test_patched_built_ins_change_the_candidates_own_values_at_most(box: Box) -> None:
    code = """
import builtins, os, sys, json, pickle, traceback
builtins.type = lambda *a: bool
builtins.isinstance = lambda *a: True
builtins.len = lambda *a: 0
builtins.print = builtins.repr = builtins.str
os.write = lambda *a: 0
os._exit = lambda *a: None
sys.exit = lambda *a: None
pickle.dumps = json.dumps = lambda *a, **k: b"true"
def f(x): return "wrong"
"""
    result = box.run(code, calls=(Call("f", (1,)),))
    assert result.outcome is not Outcome.FINISHED or result.values[0].value in ("wrong", None)
    assert_sound(box)


FORGERY = """
import os, stat, struct
int_of_20000_digits = 10**20000
def record(*parts):
    def enc(x):
        if x is int_of_20000_digits: return b"i" + struct.pack("<I", 9000) + b"x" * 9000
        if x is None: return b"N"
        if isinstance(x, bytes): return b"b" + struct.pack("<I", len(x)) + x
        if isinstance(x, str): return b"s" + struct.pack("<I", len(x)) + x.encode()
        if isinstance(x, int): return b"i" + struct.pack("<I", 4) + struct.pack("<i", x)
        return b"t" + struct.pack("<I", len(x)) + b"".join(map(enc, x))
    data = enc(parts)
    return struct.pack("<I", len(data)) + data
def forge(data):
    for fd in range(3, 64):
        try: os.write(fd, data)
        except OSError: pass
"""


def test_a_forged_record_claims_a_value_and_nothing_else(box: Box) -> None:
    code = FORGERY + 'forge(record("value", b"i\\1\\0\\0\\0\\7", None, 0, 0) + record("end"))\nos._exit(0)'
    result = box.run(code, calls=(Call("f", (1,)),))
    assert (result.outcome, result.values) == (Outcome.FINISHED, (Value(7),))  # as `def f(x): return 7` would have it


@pytest.mark.parametrize(
    "forged",
    [
        'record("fault", "the sandbox broke")',
        'record("verdict", 1)',
        'record("value", None, None, None, None)',
        'record("value", 5, 5, "a", "b") + record("value")',
        'record("value", b"l\\xff\\xff\\xff\\xff", None, -5, 10**8)',
        'record("error", 5)',
        'record("exit", "x")',
        'record("snapshot", b"")',
        'record("value", None, b"i" + b"x" * 9000, 0, 0)',
        'record("value", None, int_of_20000_digits, 0, 0)',
        'record("exit", int_of_20000_digits)',
        "bytes(range(256)) * 100",
        'struct.pack("<I", 2**32 - 1) + b"x"',
        "b't' * 10_000_000",
        'b"F" + b"the fork ended before it was locked up"',
    ],
)
def test_a_forged_record_is_never_a_fault_of_ours(box: Box, forged: str) -> None:
    result = box.run(FORGERY + f"forge({forged})\nos._exit(0)", calls=(Call("f", (1,)), Call("f", (2,))))
    assert isinstance(result, RunResult)  # no SandboxFailure: a candidate must not choose to be left out
    assert result.outcome in (Outcome.EXITED, Outcome.ERROR)
    assert [value.value for value in result.values if value.value is not None] == []


def test_keys_chosen_to_collide_do_not_stall_the_judge(box: Box) -> None:
    code = (
        FORGERY
        + """
n = 40_000
items = b"".join(b"i" + struct.pack("<I", 12) + (i * (2**61 - 1)).to_bytes(12, "little") for i in range(n))
forge(record("value", b"S" + struct.pack("<I", n) + items, None, 0, 0) + record("end"))
os._exit(0)
"""
    )
    started = time.monotonic()
    result = box.run(code, calls=(Call("f", (1,)),))
    assert time.monotonic() - started < 10
    assert result.values[0].error is not None and result.values[0].error.startswith("not data")


def test_a_million_records_do_not_stall_the_judge(box: Box) -> None:
    started = time.monotonic()
    result = box.run(FORGERY + "forge(record(None) * 700_000)\nos._exit(0)", calls=(Call("f", (1,)),))
    assert (result.outcome, result.values) == (Outcome.EXITED, ())
    assert time.monotonic() - started < 5


def test_large_values_are_read_off_the_event_loop(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []

    def reading(*arguments: Any) -> RunResult:
        readers.append(threading.current_thread() is threading.main_thread())
        return _result(*arguments)

    monkeypatch.setattr("quintet.sandbox.pool._result", reading)
    values = box.run("def f(n): return [[None] * 9] * n", calls=(Call("f", (9_000,)),)).values
    assert values[0].value == [[None] * 9] * 9_000
    assert box.run(RIGHT, calls=(Call("f", (1,)),)).values == (Value(2),)
    assert readers == [False, True]


def test_values_are_limited_together(box: Box) -> None:
    values = box.run("def f(): return 'x' * 400_000", calls=(Call("f"),) * 4).values
    assert [len(value.value or "") for value in values] == [400_000, 400_000, 0, 0]
    assert values[3].error == "not data: too large"


@pytest.mark.parametrize(
    "mischief",
    [
        "os.write(3, b'F no fault')",
        "os.write(3, b'D')",
        "os.write(3, b'R'); time.sleep(1)",
        "os.close(3); time.sleep(1)",
    ],
)
def test_a_session_that_plays_with_its_channel_harms_itself(box: Box, mischief: str) -> None:
    session = box.wait(box.sandbox.create())
    result = box.run(f"import os, time\n{mischief}\ntime.sleep(0.2)", session=session, limits=within(wall_s=5))
    assert result.outcome in (Outcome.CRASHED, Outcome.EXITED)
    box.wait(box.sandbox.destroy(session))
    assert_sound(box)


def test_a_session_does_not_run_between_its_runs(box: Box) -> None:
    session = box.wait(box.sandbox.create())
    code = """
import signal
count = 0
def tick(*_):
    global count
    count += 1
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
"""
    box.run(code, session=session)
    time.sleep(1.0)
    ticks = box.run("", session=session, expressions=("count",)).values[0].value
    assert ticks < 50
    box.wait(box.sandbox.destroy(session))


def test_a_snapshot_is_never_unpickled_by_the_judge(box: Box, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    session = box.wait(box.sandbox.create())
    code = f"class Bomb:\n    def __reduce__(self): return (open, ({str(mark)!r}, 'w'))\nbomb = Bomb()"
    box.run(code, session=session)
    snapshot = box.wait(box.sandbox.snapshot(session))
    assert b"mark" in snapshot and not mark.exists()
    box.wait(box.sandbox.destroy(session))


def test_threads_do_not_outlive_the_run(box: Box) -> None:
    code = """
import threading, time
def late():
    time.sleep(0.3)
    print("late", flush=True)
threading.Thread(target=late, daemon=True).start()
def f(x): return 1
"""
    result = box.run(code, calls=(Call("f", (1,)),), limits=within(processes=4))
    assert (result.outcome, result.stdout, result.values) == (Outcome.FINISHED, "", (Value(1),))
    endless = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    assert box.run(endless, limits=within(processes=4, wall_s=0.5)).outcome is Outcome.WALL_TIME


def test_children_do_not_outlive_the_run(box: Box) -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n"
    assert box.run(code, limits=within(processes=4)).outcome is Outcome.FINISHED


# What must not be left behind


LEAVE = """
import builtins, gc, json, math, os, random, sys, warnings
os.environ["LEFT"] = "left"
builtins.sum = lambda *a: 42
math.gcd = lambda *a: 42
sys.path.insert(0, "/tmp")
sys.modules["json"] = None
random.seed(1)
for folder in (".", "/tmp", "/var/tmp", "/dev/shm"):
    try: open(folder + "/left", "w").write("left")
    except OSError: pass
marker = "a-sample-" + "was-here"
print(marker)
"""
LOOK = """
import gc, math, os, sys
print(os.environ.get("LEFT"), sum([1, 2]), math.gcd(4, 6), "/tmp" in sys.path)
print([folder for folder in (".", "/tmp", "/var/tmp", "/dev/shm") if os.path.exists(folder + "/left")])
print(any("a-sample-" + "was-here" in text for text in gc.get_objects() if isinstance(text, str)))
import json
print(json.loads("1"), os.listdir("."))
"""


def test_one_sample_finds_nothing_of_another(jail: Box) -> None:
    for _ in range(3):
        assert jail.run(LEAVE, stdin="a-sample-was-here").outcome is Outcome.FINISHED
        assert jail.run(LOOK).stdout.splitlines() == ["None 3 2 False", "[]", "False", "1 []"]


def test_one_sample_finds_nothing_of_another_running_beside_it(jail: Box) -> None:
    async def both() -> tuple[RunResult, RunResult]:
        first = "import time\nopen('beside', 'w').write('x')\ntime.sleep(1)"
        look = "import os, time\ntime.sleep(0.4)\nprint(os.listdir('.'), os.listdir('/tmp'), os.getpid())"
        runs = [jail.sandbox.run(Program(code), LIMITS) for code in (first, look, first, look)]
        results = await asyncio.gather(*runs)
        return results[1], results[3]

    assert [result.stdout for result in jail.wait(both())] == ["[] [] 1\n"] * 2


def test_two_hundred_at_once_among_bad_ones(box: Box) -> None:
    bad = ("1/0", "import os; os._exit(0)", "while True: pass", "x = 'x' * 10**10", "import time; time.sleep(60)")

    async def all_of_them() -> list[RunResult]:
        good = [box.sandbox.run(Program(RIGHT, calls=(Call("f", (i,)),)), LIMITS) for i in range(200)]
        limits = within(wall_s=1.0, cpu_s=0.2, memory_mb=128)
        worse = [box.sandbox.run(Program(bad[i % len(bad)]), limits) for i in range(20)]
        return list(await asyncio.gather(*good, *worse))

    results = box.wait(all_of_them())
    assert [result.values for result in results[:200]] == [(Value(i + 1),) for i in range(200)]
    assert {result.outcome for result in results[200:]}.isdisjoint({Outcome.FINISHED})


def test_nothing_is_left_on_the_host(box: Box) -> None:
    """Last: after all of the above, no process but the warm ones, no file, and the next sample is graded right."""
    assert_nothing_left(box)

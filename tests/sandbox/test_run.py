"""What comes back from a program: output, values, and how it ended."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from quintet.sandbox.protocol import Call, Limits, Outcome, Program, Value
from quintet.types import QuintetError
from tests.sandbox.boxes import LIMITS, Box, within


def test_output_and_input_go_through(box: Box) -> None:
    code = "import sys\nprint(input()[::-1])\nprint(sys.stdin.read(), end='')\nprint('e', file=sys.stderr)"
    result = box.run(code, stdin="abc é\n2\n3")
    assert (result.outcome, result.exit_code) == (Outcome.FINISHED, 0)
    assert (result.stdout, result.stderr) == ("é cba\n2\n3", "e\n")


def test_calls_then_expressions_give_values_and_what_each_printed(box: Box) -> None:
    code = "print('start')\ndef f(a, b=1):\n    print('f', a)\n    a.append(b)\n    return a, {b}"
    shared = [1]
    calls = (Call("f", (shared,)), Call("f", (shared,), {"b": 2}), Call("[].append", (1, 2)))
    result = box.run(code, calls=calls, expressions=("f([])[0]", "lambda: 0"))
    assert result.stdout == "start\nf [1]\nf [1]\nf []\n"
    assert result.values[:2] == (Value(([1, 1], {1}), stdout="f [1]\n"), Value(([1, 2], {2}), stdout="f [1]\n"))
    assert result.values[2].error is not None and result.values[2].error.startswith("TypeError")
    assert result.values[3] == Value([1], stdout="f []\n")
    assert result.values[4].error == "not data: function is not plain data"


def test_a_call_may_name_a_method_or_a_module(box: Box) -> None:
    code = "import math\nclass Solution:\n    def f(self, x): return x + 1"
    result = box.run(code, calls=(Call("Solution().f", (1,)), Call("math.gcd", (4, 6))))
    assert [value.value for value in result.values] == [2, 2]


def test_a_program_under_another_name_does_not_start_its_script(box: Box) -> None:
    code = "def f(): return 1\nif __name__ == '__main__':\n    print(f(), input())"
    result = box.run(code, calls=(Call("f"),), name="solution")
    assert (result.stdout, result.values) == ("", (Value(1),))


@pytest.mark.parametrize(
    ("code", "outcome", "exit_code"),
    [
        ("1/0", Outcome.ERROR, 1),
        ("f(", Outcome.ERROR, 1),
        ("exit()", Outcome.EXITED, 0),
        ("import sys; sys.exit(3)", Outcome.EXITED, 3),
        ("import os; os._exit(0)", Outcome.EXITED, 0),
        ("raise SystemExit('why')", Outcome.EXITED, 1),
        ("import ctypes; ctypes.string_at(0)", Outcome.CRASHED, None),
        ("x = bytearray(10**10)", Outcome.MEMORY, 1),
    ],
)
def test_how_it_ended(box: Box, code: str, outcome: Outcome, exit_code: int | None) -> None:
    result = box.run(code, calls=(Call("print"),))
    assert (result.outcome, result.exit_code, result.values) == (outcome, exit_code, ())


def test_an_exception_is_reported_with_the_programs_lines_only(box: Box) -> None:
    result = box.run("def f():\n    return 1 / 0\n\nf()")
    assert [line.strip() for line in result.stderr.splitlines() if "File" in line] == [
        'File "main.py", line 4, in <module>',
        'File "main.py", line 2, in f',
    ]
    assert "return 1 / 0" in result.stderr


def test_files_lie_in_the_scratch_folder(box: Box) -> None:
    result = box.run("print(open('in/a.txt').read())", files={"in/a.txt": b"content"})
    assert result.stdout == "content\n"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_files_outside_the_scratch_folder_are_refused(box: Box, name: str) -> None:
    with pytest.raises(QuintetError, match="scratch folder"):
        box.run("", files={name: b""})


def test_what_a_program_registers_for_its_end_is_done(box: Box) -> None:
    assert box.run("import atexit; atexit.register(print, 'bye')").stdout == "bye\n"


def test_common_modules_and_habits_work(box: Box) -> None:
    code = """
import asyncio, resource, signal, sys, tempfile, threading, uuid
resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)
async def main():
    await asyncio.sleep(0.001)
    return await asyncio.gather(*(asyncio.sleep(0, i) for i in range(3)))
print(asyncio.run(main()))
with tempfile.TemporaryDirectory() as folder:
    open(folder + '/x', 'w').write('y')
signal.alarm(10)
print(len(str(uuid.uuid4())), open(0).read())
"""
    result = box.run(code, stdin="rest")
    assert (result.stderr, result.stdout) == ("", "[0, 1, 2]\n36 rest\n")


def test_threads_are_allowed_where_the_limit_says_so_and_waited_for(box: Box) -> None:
    code = """
import threading, sys
sys.setrecursionlimit(10**5)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
threading.stack_size(2**26)
threading.Thread(target=lambda: print(depth(20000))).start()
"""
    assert box.run(code, limits=within(processes=4)).stdout == "20000\n"


def test_the_same_program_gives_the_same_result_each_time(box: Box) -> None:
    code = "import random\nprint(list({'a', 'b', 'c', 'd', 'e'}), random.random())"
    assert len({box.run(code).stdout for _ in range(4)}) == 1


def test_many_at_once_overlap_and_keep_apart(box: Box) -> None:
    async def all_of_them() -> list[str]:
        limits = Limits(wall_s=20.0)
        runs = [box.sandbox.run(Program(f"import time; time.sleep(0.3); print({i})"), limits) for i in range(24)]
        return [result.stdout for result in await asyncio.gather(*runs)]

    started = time.monotonic()
    assert box.wait(all_of_them()) == [f"{i}\n" for i in range(24)]
    assert time.monotonic() - started < 24 * 0.3 / 2


def test_the_event_loop_is_free_while_a_program_runs(box: Box) -> None:
    async def ticks_meanwhile() -> int:
        run = asyncio.ensure_future(box.sandbox.run(Program("import time; time.sleep(0.5)"), LIMITS))
        ticks = 0
        while not run.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert box.wait(ticks_meanwhile()) > 10


def test_waiting_for_a_busy_processor_is_not_charged(box: Box) -> None:
    """More programs than cores, each of which needs most of its limit: on a plain clock all but a few would fail."""
    code = "import time\nwhile time.process_time() < 0.25: pass"
    cores = len(os.sched_getaffinity(0))
    if cores > 16:
        pytest.skip("needs more programs at once than there are cores")

    async def outcomes() -> set[Outcome]:
        limits = Limits(wall_s=0.6, cpu_s=0.6)
        results = await asyncio.gather(*(box.sandbox.run(Program(code), limits) for _ in range(4 * cores)))
        assert max(result.wall_s for result in results) > 0.6
        return {result.outcome for result in results}

    assert box.wait(outcomes()) == {Outcome.FINISHED}


def test_a_cancelled_run_is_ended(box: Box) -> None:
    async def cancel() -> float:
        run = asyncio.ensure_future(box.sandbox.run(Program("while True: pass"), Limits(wall_s=60, cpu_s=60)))
        await asyncio.sleep(0.2)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        started = time.monotonic()
        await box.sandbox.run(Program(""), LIMITS)
        return time.monotonic() - started

    assert box.wait(cancel()) < 10

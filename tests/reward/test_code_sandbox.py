"""The reward `code` in a real sandbox: what cheats earn, how programs without end end, and that the next one is graded
right. What the walls themselves hold is tested in tests/sandbox."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quintet.reward.background import BackgroundLoop
from quintet.reward.code import CodeGrader
from quintet.reward.sample import Sample, Verdict
from quintet.types import QuintetError

CASES = {
    row["id"]: row
    for row in map(json.loads, (Path(__file__).parents[1] / "data" / "cases_code.jsonl").read_text().splitlines())
}
TESTS: list[dict[str, Any]] = [
    {"function": "f", "args": [3], "expected": 8675309},
    {"assert": "assert f(4) == 8675310"},
    {"assert": "import math\nfor i in (5, 6):\n    assert math.isclose(f(i), 8675306 + i)"},
]
RIGHT = "def f(x):\n    return x + 8675306"


class Graded:
    """A started grader and its loop."""

    def __init__(self) -> None:
        limits = {"wall_s": 4.0, "cpu_s": 1.0, "memory_mb": 512, "output_bytes": 1_000_000}
        args = {"extract": "whole", "sandbox": {"backend": "namespace", "workers": 1, "limits": limits}}
        self._loop = BackgroundLoop()
        self._grader = CodeGrader("code", args, 30.0)
        try:
            self._loop.run(self._grader.start())
        except QuintetError as error:
            self._loop.close()
            pytest.skip(str(error))

    def __call__(self, *codes: str, tests: list[dict[str, Any]] = TESTS) -> list[Verdict]:
        async def all_of_them() -> list[Verdict]:
            samples = [Sample(str(hash(str(tests))), code, [], False, test_cases=tests) for code in codes]
            return list(await asyncio.gather(*map(self._grader.grade, samples)))

        return self._loop.run(all_of_them())

    def close(self) -> None:
        self._loop.run(self._grader.close())
        self._loop.close()


@pytest.fixture(scope="module")
def graded() -> Iterator[Graded]:
    grader = Graded()
    yield grader
    grader.close()


def test_a_right_program_passes_every_kind_of_test(graded: Graded) -> None:
    assert graded(RIGHT) == [Verdict(1.0, {"passed": 4, "tests": 4})]


EQUAL = "class E:\n    def __eq__(s, o):\n        return True\n    __hash__ = None\n"
CHEATS = {
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "exit in the function": "import os\ndef f(x):\n    os._exit(0)",
    "equal to everything": EQUAL + "def f(x):\n    return E()",
    "a number equal to everything": "class E(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
    "def f(x):\n    return E(1)",
    "patched builtins": "import builtins, math\nbuiltins.abs = lambda x: 0\nmath.isclose = lambda *a, **k: True\n"
    "builtins.AssertionError = type('A', (Exception,), {})\ndef f(x):\n    return 0",
    "a result file": "import os\nfor name in ('result', 'result.json', 'verdict'):\n    try:\n"
    "        open(name, 'w').write('passed')\n    except OSError:\n        pass\ndef f(x):\n    return 0",
    "searching the heap": """
import gc
def f(x):
    for d in [o for o in gc.get_objects() if type(o) is dict]:
        for v in list(d.values()):
            if type(v) is int and 8675300 < v < 8675320:
                return v
    return 0
""",
    "a thread that outlives the run": "import threading, time\ndef late():\n    time.sleep(60)\n"
    "try:\n    threading.Thread(target=late).start()\nexcept RuntimeError:\n    pass\ndef f(x):\n    return 0",
    "patched printing": "import sys, os\nsys.stdout = None\ndef f(x):\n    os.write(1, b'8675309')\n    return None",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_earns_nothing_and_the_next_program_is_graded_right(graded: Graded, name: str) -> None:
    verdict, right = graded(CHEATS[name], RIGHT)
    assert verdict.value == 0.0 and verdict.info["passed"] == 0 and verdict.info["reason"]
    assert right.value == 1.0


def test_rew06_exit_before_the_tests(graded: Graded) -> None:
    case = CASES["REW06"]
    assert case["input"]["variants"] == ["normal exit", "hard exit"]
    verdicts = graded("print(1)\nraise SystemExit(0)", "import os\nos._exit(0)")
    assert [v.value for v in verdicts] == [case["expect"]["reward"]] * 2


ENDLESS = {
    "children": "import os\nwhile True:\n    os.fork()",
    "a loop": "while True:\n    pass",
    "output": "while True:\n    print('x' * 100_000)",
    "memory": "x = bytearray(10 * 1024 ** 3)",
    "recursion": "def g(n):\n    return g(n + 1)\ng(0)",
}


def test_rew14_programs_without_end_end_within_their_limits(graded: Graded) -> None:
    start = time.monotonic()
    verdicts = graded(*ENDLESS.values(), tests=[{"input": "", "output": ""}])
    assert [v.value for v in verdicts] == [CASES["REW14"]["expect"]["reward"]] * len(ENDLESS)
    reasons = dict(zip(ENDLESS, (v.info["reason"] for v in verdicts), strict=True))
    assert "PermissionError" in reasons["children"] or "OSError" in reasons["children"], reasons
    assert "processor time" in reasons["a loop"] or "did not end" in reasons["a loop"]
    assert "printed more than 1000000 bytes" in reasons["output"]
    assert "memory" in reasons["memory"].lower()
    assert "RecursionError" in reasons["recursion"]
    assert time.monotonic() - start < 60  # they ran side by side; the machine of a test may be busy
    assert graded(RIGHT)[0].value == 1.0

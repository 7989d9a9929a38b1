"""The reward `code`: which program is taken, what passes, and that no expected value comes near the candidate.

Programs run in a stand-in for a sandbox here; what a real one contains is tested in tests/sandbox.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from quintet.reward.code import CodeGrader
from quintet.reward.code_tests.cases import UnusableTests
from quintet.reward.code_tests.compare import printed_equal, values_equal
from quintet.reward.code_tests.extract import fill_template, last_block
from quintet.reward.code_tests.reading import read_tests
from quintet.reward.config import RewardConfig
from quintet.reward.errors import FunctionFailed
from quintet.reward.sample import Sample, Verdict
from quintet.reward.service import LocalRewardService
from quintet.sandbox.protocol import SandboxFailure
from quintet.types import FailureKind, FinishReason, Group, GroupId, Prompt, QuintetError, Rollout, Score
from tests.reward.inline_sandbox import InlineSandbox


def grade(
    code: str,
    tests: list[dict[str, Any]],
    sandbox: InlineSandbox | None = None,
    metadata: dict[str, Any] | None = None,
    prompt: str = "",
    **args: Any,
) -> Verdict:
    """The verdict on a whole response that is `code`."""
    grader = CodeGrader("code", {"extract": "whole", **args}, 5.0, sandbox or InlineSandbox())
    sample = Sample("p", code, [1], False, test_cases=tests, metadata=metadata or {}, prompt_text=prompt)
    return asyncio.run(grader.grade(sample))


def asserts(*lines: str) -> list[dict[str, Any]]:
    return [{"assert": line} for line in lines]


HUMAN_EVAL = """
METADATA = {"author": "jt"}


def check(candidate):
    assert candidate([1.0, 2.0], 0.5) == False
    assert candidate([1.0, 2.0], 1.5) == True
    assert True, "always"
"""


# -- extraction -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\na\n```\nbetter:\n```py\nb\n```\n", "b\n"),
        ("```python\na\n```\nit prints\n```\n3\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```bash\nls\n```", None),
        ("```python\na\n```\nno, wait:\n```python\nb", "a\n"),
        ("<think>```python\nold\n```</think>", None),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        ("print(1)", None),
    ],
)
def test_the_last_complete_block_of_python_is_taken(response: str, code: str | None) -> None:
    assert last_block(response) == code


def test_a_response_without_a_block_is_a_verdict_of_0() -> None:
    verdict = grade("print(3)", [{"input": "", "output": "3"}], extract="block")
    assert verdict == Verdict(0.0, {"reason": "no complete code block"})


def test_the_template_is_filled_once() -> None:
    assert fill_template("{prompt}    {code} # {x}", "return {prompt}", "def f():\n") == (
        "def f():\n    return {prompt} # {x}"
    )


# -- comparison -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "got", "equal"),
    [
        ("1\n2\n", "1 \n2", True),
        ("1\n2\n", "1\n\n2", False),
        ("1 2", "1  2", False),
        ("0.142857142857", "0.142857", True),
        ("0.142857142857", "0.1428", False),
        ("1e6", "1000000.5", True),
        ("1e6", "1000002", False),
        ("10000000", "10000000.0", False),
        ("10000000", "10000001", False),
        ("[0.5, 1.25]", "[0.5000000001, 1.25]", True),
        ("x1.5", "x1.50", False),
        ("a\r\nb", "a\nb", True),
        ("", "", True),
        ("", "\n\n", True),
        ("", "0", False),
        ("yes", "Yes", False),
        ("1e999", "1e998", False),
        ("-1.5", "-1.4999999", True),
        ("3-1.5", "3-1.5000001", True),
    ],
)
def test_printed_text_is_compared_line_by_line_and_floats_within_1e_6(expected: str, got: str, equal: bool) -> None:
    assert printed_equal(expected, got) is equal


def test_hostile_output_takes_no_longer_than_its_length() -> None:
    start = time.perf_counter()
    digits = "1" * 300_000
    for line in (
        digits + "x",
        digits + "." + digits + "x",
        "1e" + digits + "x",
        ("1." + "+") * 100_000,
        ".1" * 100_000,
    ):
        assert not printed_equal("0.5" + line, line)
        assert last_block(f"```{' ' * 100_000}`\n{line}") is None
    assert time.perf_counter() - start < 5


def test_an_integer_too_long_to_be_written_is_compared_and_not_written() -> None:
    code = "def f():\n    return 10 ** 5000"
    assert grade(code, [{"function": "f", "expected": 10**5000}]).value == 1.0
    verdict = grade(code, [{"function": "f", "expected": 1}])
    assert verdict.info["reason"] == "f() is a number too long to be shown, expected 1"


@pytest.mark.parametrize(
    ("expected", "got", "equal"),
    [
        (1, True, False),
        (True, 1, False),
        (True, True, True),
        (4, 4.0, True),
        (4, 4.0000001, False),
        (0.3, 0.1 + 0.2, True),
        (2.0, 2, True),
        (0.5, 10**400, False),
        ([1, [2]], (1, (2,)), True),
        ([1], {1}, False),
        ({"1": [2]}, {1: (2,)}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("1", 1, False),
        (None, None, True),
        (None, 0, False),
        (float("nan"), float("nan"), True),
    ],
)
def test_values_are_compared_by_kind(expected: Any, got: Any, equal: bool) -> None:
    assert values_equal(expected, got) is equal


# -- standard input and output --------------------------------------------------------------------


ADD = "a, b = map(int, input().split())\nprint(a + b)"


def test_programs_that_read_and_print() -> None:
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "4\n"}]
    assert grade(ADD, tests) == Verdict(1.0, {"passed": 2, "tests": 2})
    wrong = grade(ADD.replace("+", "*"), tests)
    assert wrong.value == 0.0 and wrong.info["reason"] == "input '1 2\\n': printed '2\\n', expected '3\\n'"
    assert grade(ADD.replace("+", "*"), tests, partial=True).value == 0.5


def test_after_a_failed_input_the_others_are_not_run() -> None:
    sandbox = InlineSandbox()
    grade("print(0)", [{"input": str(i), "output": "1"} for i in range(20)], sandbox)
    assert sandbox.runs == 1


@pytest.mark.parametrize(
    ("code", "output", "value"),
    [
        ("print(3); exit(0)", "3", 1.0),
        ("raise SystemExit(0)", "3", 0.0),
        ("exit(0)", "", 0.0),
        ("print(3); exit(1)", "3", 0.0),
        ("raise ValueError('no')", "", 0.0),
        ("pass", "", 1.0),
    ],
)
def test_how_a_program_ends_counts_where_nothing_was_to_be_printed(code: str, output: str, value: float) -> None:
    assert grade(code, [{"input": "", "output": output}]).value == value


def test_the_reason_of_a_raise_is_its_last_line() -> None:
    verdict = grade("raise ValueError('no')", [{"input": "", "output": ""}])
    assert verdict.info["reason"] == "input '': raised ValueError: no"


def test_lists_of_inputs_as_in_taco() -> None:
    tests: list[dict[str, Any]] = [{"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]}]
    assert grade(ADD, tests).info == {"passed": 2, "tests": 2}


@pytest.mark.parametrize(
    "code",
    ["def add(a, b):\n    return a + b", "class Solution:\n    def add(self, a, b):\n        return a + b"],
)
def test_functions_named_by_the_data_may_be_methods_of_a_solution_class(code: str) -> None:
    taco: list[dict[str, Any]] = [{"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [[1, 2]]]}]
    live: list[dict[str, Any]] = [{"testtype": "functional", "input": "1\n2", "output": "3"}]
    assert grade(code, taco).value == 1.0
    assert grade(code, live, metadata={"func_name": "add"}).value == 1.0
    assert grade(code.replace("+", "-"), live, metadata={"func_name": "add"}).value == 0.0


# -- function calls -------------------------------------------------------------------------------


def test_function_calls_with_expected_values_and_errors() -> None:
    tests: list[dict[str, Any]] = [
        {"function": "root", "args": [9], "expected": 3},
        {"function": "root", "args": [2], "expected": 1.41421356},
        {"function": "root", "args": [], "kwargs": {"x": 4}, "expected": 2.0},
        {"function": "root", "args": [-1], "raises": "ValueError"},
    ]
    assert grade("import math\ndef root(x):\n    return math.sqrt(x)", tests).info == {"passed": 4, "tests": 4}
    silent = grade("def root(x):\n    return abs(x) ** 0.5", tests, partial=True)
    assert silent.value == 0.75 and silent.info["reason"] == "root(-1): no error, expected ValueError"


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "raise SystemExit", "raise KeyboardInterrupt"])
def test_a_program_that_ends_before_the_tests_earns_nothing(leave: str) -> None:
    tests: list[dict[str, Any]] = [{"function": "f", "args": [], "expected": 1}, *asserts("assert f() == 1")]
    assert grade(f"def f():\n    return 1\n{leave}", tests).value == 0.0


def test_an_object_equal_to_everything_is_no_data() -> None:
    cheat = "class Any:\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(x):\n    return Any()"
    calls: list[dict[str, Any]] = [{"function": "f", "args": [1], "expected": 2}]
    for tests in (calls, asserts("assert f(1) == 2")):
        assert grade(cheat, tests).value == 0.0
    verdict = grade(cheat, asserts("for i in range(2):\n    assert f(i) == 7"))
    assert verdict.value == 0.0 and "data" in verdict.info["reason"]


# -- asserts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("assert f(2) == 4", "return x * 2", "return x"),
        ("assert 4 == f(2)", "return x * 2", "return x"),
        ("assert f(2) != 4", "return x", "return x * 2"),
        ("assert f(2) is None", "return None", "return 0"),
        ("assert f(2) is True", "return True", "return 1"),
        ("assert not f(2)", "return []", "return [0]"),
        ("assert f(2)", "return 'a'", "return ''"),
        ("assert f(2) in (3, 4)", "return 4", "return 5"),
        ("assert 2 in f(2)", "return [x]", "return []"),
        ("assert 'b' not in f(2)", "return 'a'", "return 'b'"),
        ("assert f(2) < 3 and f(9) > 3", "return x", "return 1"),
        ("assert sorted(f(3)) == [0, 1, 2]", "return set(range(x))", "return [0, 1]"),
        ("assert list(f(3)) == [0, 1, 2]", "yield from range(x)", "yield 0"),
        ("assert f(2)[0] == 'a'", "return 'ab'", "return 'ba'"),
        ("assert f(2) == {1, 2}", "return {1, 2}", "return [1, 2]"),
        ("assert f(2) == set('ab')", "return {'a', 'b'}", "return {'a'}"),
        ("import math\nassert f(2) == math.sqrt(4)", "return 2.0", "return 2.1"),
        ("data = [0] * 3\nassert f(data) == [0, 0, 0]", "return x", "return []"),
        ("import math\nassert math.isclose(f(2), 1 / 3, rel_tol=1e-3)", "return 0.3333", "return 0.33"),
        ("assert abs(f(2) - 3.0) < 1e-6", "return 3.0000001", "return 3.1"),
        ("assert all(f(i) == i * i for i in range(5))", "return x * x", "return x"),
        ("for i, want in [(1, 1), (2, 4)]:\n    got = f(i)\n    assert got == want", "return x * x", "return x"),
        ("assert f(f(2)) == 4", "return x + 1", "return x"),
        ("assert f(1) == f(1)", "return x", "return globals().setdefault('n', []).append(1) or len(n)"),
        ("def same(a, b):\n    assert a == b\nsame(f(1), 1)\nsame(f(2), 2)", "return x", "return 1"),
        ("def test_one():\n    assert f(1) == 1\ndef test_two():\n    assert f(2) == 2", "return x", "return 1"),
        ("try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass", "raise ValueError", "return x"),
        (
            "try:\n    f(-1)\nexcept KeyError:\n    pass\nelse:\n    assert False",
            "raise KeyError(x)",
            "raise ValueError",
        ),
        ("import pytest\nwith pytest.raises(ValueError):\n    f(1)", "raise ValueError('x')", "return x"),
        ("import pytest\nassert f(1) == pytest.approx(0.3)", "return 0.1 + 0.2", "return 0.31"),
        ("import random\nn = random.randint(1, 9)\nassert f(n) == n", "return x", "return 0"),
        ("assert isinstance(f(1), int)", "return x", "return 'a'"),
    ],
)
def test_asserts_are_separated_and_decided(test: str, right: str, wrong: str) -> None:
    assert grade(f"def f(x):\n    {right}", asserts(test)).value == 1.0
    assert grade(f"def f(x):\n    {wrong}", asserts(test)).value == 0.0


CANARY = 86753091


@pytest.mark.parametrize(
    "test",
    [
        f"assert f(1) == {CANARY}",
        f"want = {CANARY}\nassert f(1) == want",
        f"assert f(1) == [{CANARY} for _ in range(1)]",
        f"def check(candidate):\n    want = {CANARY}\n    assert candidate(1) == want\ncheck(f)",
        f"assert all(f(i) == {CANARY} for i in range(3))",
        f"assert isinstance(f(1), int) and f(2) == {CANARY}",
        f"assert abs(f(1) - {CANARY}) < 1",
        f"for i in range(2):\n    assert f(i) == {CANARY}",
    ],
)
def test_no_expected_value_is_in_a_run_with_the_candidate(test: str) -> None:
    sandbox = InlineSandbox()
    grade("def f(x):\n    return 'something'", asserts(test), sandbox)
    with_candidate = [text for text in sandbox.seen if "def f(x)" in text]
    assert with_candidate and not any(str(CANARY) in text for text in with_candidate)


def test_human_eval_checks_call_the_entry_point() -> None:
    near = "def near(xs, t):\n    return any(abs(a - b) < t for i, a in enumerate(xs) for b in xs[:i])"
    metadata = {"entry_point": "near"}
    assert grade(near, asserts(HUMAN_EVAL), metadata=metadata) == Verdict(1.0, {"passed": 2, "tests": 2})
    assert grade("def near(xs, t):\n    return True", asserts(HUMAN_EVAL), metadata=metadata, partial=True).value == 0.5


def test_a_check_with_helpers_and_loops_runs_apart() -> None:
    source = (
        "def check(candidate):\n    from random import randint\n    def slow(n):\n        return sum(range(n))\n"
        "    for _ in range(10):\n        n = randint(1, 50)\n        assert candidate(n) == slow(n)\n"
    )
    sandbox = InlineSandbox()
    right = grade("def tri(n):\n    return n * (n - 1) // 2", asserts(source), sandbox, {"entry_point": "tri"})
    assert right == Verdict(1.0, {"passed": 10, "tests": 10})
    assert sandbox.runs == 3  # to find the calls, to have them answered, to decide
    assert grade("def tri(n):\n    return 0", asserts(source), metadata={"entry_point": "tri"}).value == 0.0


def test_an_entry_point_may_be_a_method() -> None:
    code = "class Solution:\n    def twice(self, n):\n        return n * 2"
    source = "def check(candidate):\n    assert candidate(n=2) == 4"
    assert grade(code, asserts(source), metadata={"entry_point": "Solution().twice"}).value == 1.0


def test_helpers_that_the_prompt_defines_are_not_the_candidates_to_redefine() -> None:
    prompt = 'def encode(s):\n    return s[::-1]\n\n\ndef decode(s):\n    """Undo encode."""\n'
    test = "def check(candidate):\n    for s in ('abc', 'xyz'):\n        assert candidate(encode(s)) == s"
    given: dict[str, Any] = {"metadata": {"entry_point": "decode"}, "prompt": prompt, "template": "{prompt}{code}"}
    assert grade("    return s[::-1]\n", asserts(test), **given).value == 1.0
    cheat = "    return s\n\ndef encode(s):\n    return s\n"
    assert grade(cheat, asserts(test), **given).value == 0.0


def test_a_helper_that_nobody_defines_is_reported() -> None:
    source = "def check(candidate):\n    assert candidate(encode('abc')) == 'abc'"
    with pytest.raises(UnusableTests, match="calls `encode`, which is not the function under test"):
        read_tests(asserts(source), "decode", "Write decode.")


def test_a_module_that_is_not_imported_is_not_taken_for_the_candidates() -> None:
    test = asserts("assert math.isclose(f(2), 2.0)")
    assert grade("def f(x):\n    return 2", test).value == 1.0
    cheat = "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x):\n    return 0"
    assert grade(cheat, test).value == 0.0


def test_constants_of_one_assert_do_not_meet_those_of_another() -> None:
    tests = asserts("x = [1]\nassert f(x) == [1]", "x = [2]\nassert f(x) == [2]")
    assert grade("def f(x):\n    return x", tests).value == 1.0


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("assert 1 == 1", "calls no function"),
        ("def broken(:", "no Python"),
        ("xs = [2, 1]\nf(xs)\nassert xs == [1, 2]", "changes in place"),
        ("def check(candidate):\n    assert candidate(1)", "entry_point"),
        ("for g in [1]:\n    assert f(lambda x: x) == 1", "given a function"),
        ("s = Stack()\ns.push(1)\nassert s.pop() == 1", "makes an object"),
        ("try:\n    f(1)\nexcept MyError:\n    assert True", "class of the candidate"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert f(1)", "unittest"),
        ("x = f(1)\ny = x + 1", "asserts nothing"),
        ("from math import *\nassert isclose(f(1), 2)", "name what is imported"),
    ],
)
def test_what_cannot_be_separated_is_reported_when_data_is_loaded(test: str, reason: str) -> None:
    grader = CodeGrader("code", {}, 5.0, InlineSandbox())
    fault = grader.reference_fault(Prompt("p", [1], test_cases=asserts("assert f(1) == 1", test)))
    assert fault is not None and fault.startswith("its tests cannot be run: test 2: ") and reason in fault
    assert grader.reference_fault(Prompt("p", [1], test_cases=asserts("assert f(1) == 1"))) is None


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ({}, "neither input and output nor function nor assert"),
        ({"input": "1"}, "keys: input"),
        ({"input": {"a": 1}, "output": "1"}, "must be text"),
        ({"function": "f", "args": [1]}, "either expected or raises"),
        ({"function": "f(", "args": [], "expected": 1}, "no name of a function"),
        ({"inputs": ["1"], "outputs": []}, "one length"),
        ({"fn_name": "f", "inputs": ["a"], "outputs": ["1"]}, "not JSON"),
        ({"assert": 3}, "not a string"),
    ],
)
def test_test_cases_that_cannot_be_read_are_named(test: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableTests, match=r"^test 1: ") as caught:
        read_tests([test])
    assert reason in str(caught.value)
    with pytest.raises(UnusableTests, match="there is no test"):
        read_tests([])


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("import no_such_module\nfor i in range(2):\n    assert f(i)", "fails by itself: ModuleNotFoundError"),
        ("assert f(1) == 1 / 0", "expected value `1 / 0` cannot be computed: ZeroDivisionError"),
        ("x = 0\nwhile f(x) != 'never':\n    x += 1\nassert x", "after 20 rounds"),
    ],
)
def test_test_code_that_fails_by_itself_is_a_failure_not_a_0(test: str, reason: str) -> None:
    with pytest.raises(FunctionFailed, match="the tests of prompt p cannot be run") as caught:
        grade("def f(x):\n    return x", asserts(test))
    assert reason in caught.value.message


# -- faults of the sandbox, options ---------------------------------------------------------------


def test_a_fault_of_the_sandbox_is_a_failure_that_says_whether_a_retry_may_help() -> None:
    for retryable in (True, False):
        sandbox = InlineSandbox([SandboxFailure("a worker was lost", retryable=retryable)])
        with pytest.raises(FunctionFailed, match="sandbox: a worker was lost") as caught:
            grade("print(3)", [{"input": "", "output": "3"}], sandbox)
        assert caught.value.kind is FailureKind.SANDBOX and caught.value.retryable is retryable


def service(backend: str) -> LocalRewardService:
    args = {"extract": "whole", "sandbox": {"backend": f"tests.reward.inline_sandbox:{backend}"}}
    config = RewardConfig.model_validate({"functions": [{"fn": "code", "args": args}], "max_failure_frac": 1.0})
    return LocalRewardService(config)


def scored(service: LocalRewardService, codes: list[str], tests: list[dict[str, Any]] | None) -> list[Score]:
    group_id = GroupId("p")
    rollouts = [Rollout(group_id, i, [1], [1], code, [0.0], [1], [], FinishReason.STOP) for i, code in enumerate(codes)]
    group = Group(group_id, Prompt("p", [1], test_cases=tests), rollouts)
    try:
        return asyncio.run(service.score([group]))[0]
    finally:
        service.close()


def test_in_the_reward_service_a_lost_run_is_made_once_more() -> None:
    tests = [{"function": "f", "args": [i], "expected": 2 * i} for i in range(3)]
    codes = ["def f(x):\n    return x * 2", "def f(x):\n    return x"] * 4
    scores = scored(service("LosesEveryThirdRun"), codes, tests)
    assert [score.reward for score in scores] == [1.0, 0.0] * 4
    assert scores[1].info == {"code": {"passed": 1, "tests": 3, "reason": "f(1) is 1, expected 2"}}
    lost = scored(service("LosesEveryRun"), codes[:2], tests)
    failures = [score.failure for score in lost]
    assert [score.reward for score in lost] == [None, None]
    assert all(f is not None and f.kind is FailureKind.SANDBOX and f.retryable for f in failures)


def test_prompts_without_usable_tests_are_reported_when_data_is_loaded() -> None:
    prompts = [
        Prompt("a", [1], test_cases=asserts("assert f(1) == 1")),
        Prompt("b", [1]),
        Prompt("c", [1], test_cases=asserts("assert 1 == 1")),
    ]
    found = service("InlineSandbox").unusable_references(prompts)
    assert [row for row, _ in found] == [1, 2]
    assert found[0][1] == "its tests cannot be run: there are none (data.columns.test_cases)"


def test_prompts_of_one_id_are_not_taken_for_each_other() -> None:
    grader = CodeGrader("code", {"extract": "whole"}, 5.0, InlineSandbox())

    def value(expected: int) -> float | None:
        tests = asserts(f"assert f() == {expected}")
        return asyncio.run(grader.grade(Sample("p", "def f():\n    return 1", [1], False, test_cases=tests))).value

    assert [value(1), value(2), value(1)] == [1.0, 0.0, 1.0]


def test_a_sandbox_that_does_not_work_is_said_at_the_start() -> None:
    lost = CodeGrader("code", {}, 5.0, InlineSandbox([SandboxFailure("nobody answers")]))
    with pytest.raises(QuintetError, match="reward function `code`: sandbox: nobody answers"):
        asyncio.run(lost.start())


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"sandbx": {}}, "option `sandbx`"),
        ({"template": "x"}, "must contain {code}"),
        ({"sandbox": {"backend": "docker"}}, "not 'docker'"),
        ({"extract": "first"}, "option `extract`"),
    ],
)
def test_wrong_options_are_refused_by_name(args: dict[str, Any], reason: str) -> None:
    with pytest.raises(QuintetError, match="reward function `code`") as caught:
        CodeGrader("code", args, 5.0)
    assert reason in str(caught.value)


def test_reward_cases_of_code() -> None:
    path = Path(__file__).parents[1] / "data" / "cases_code.jsonl"
    cases = {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
    for case in (cases["REW10"], cases["REW13"]):
        given = case["input"]
        verdict = grade(f"print({given['got']!r})", [{"input": "", "output": given["expected_stdout"]}])
        assert verdict.value == case["expect"]["reward"], case["id"]
    given = cases["REW08"]["input"]
    tests = [{"input": "", "output": given["expected_output"]}]
    assert grade("raise ValueError", tests).value == cases["REW08"]["expect"]["reward"]

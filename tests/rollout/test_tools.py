"""Tools: schemas from signatures, safe arithmetic, search, Python in a sandbox, and calls that do not parse."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from quintet.rollout.config import EnvironmentConfig, ToolConfig
from quintet.rollout.environment import Action, EnvironmentFailure, Outcome, Step
from quintet.rollout.environments import EnvironmentFactory, environment_problem
from quintet.rollout.search import Corpus
from quintet.rollout.tool_calls import Malformed, ToolCall, parse_tool_calls
from quintet.rollout.tool_environment import ToolEnvironment
from quintet.rollout.tools import Tool, ToolError, calculator, python_tool, search_tool
from quintet.sandbox.protocol import Limits, Program, RunResult, SandboxFailure
from quintet.sandbox.protocol import Outcome as RunOutcome
from quintet.types import FailureKind, FinishReason, QuintetError

CASES = {
    row["id"]: row
    for row in map(json.loads, (Path(__file__).parents[1] / "data" / "cases_multi_turn.jsonl").read_text().splitlines())
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34*2", "80"),
        ("07*08", "56"),
        ("100-007", "93"),
        ("1.05+0.5", "1.55"),
        ("10.0/4", "2.5"),
        ("-(3-5)**2", "-4"),
        ("17//5 + 17%5", "5"),
        ("2**100", str(2**100)),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getcwd()",
        "(1).__class__",
        "x+1",
        "'a'*3",
        "1 if 1 else 2",
        "[1,2]",
        "9**9**9**9",
        "(9**999)**9",
        "10**4000*10**4000",
        "1/0",
        "1e300*1e300*1e300**9",
        "(-1)**0.5",
        "12+",
        "True+1",
        "",
        "(" * 150 + "1" + ")" * 150,
        "1" * 300,
    ],
)
def test_the_calculator_refuses_at_once_what_is_no_arithmetic_or_too_large(expression: str) -> None:
    began = time.monotonic()
    try:
        assert calculator(expression) in ("inf", "1")
    except ToolError as error:
        assert str(error)
    assert time.monotonic() - began < 1.0


def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


def test_a_functions_schema_is_made_of_its_signature() -> None:
    assert Tool.of(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"title": "A", "type": "integer"},
                    "b": {"title": "B", "type": "integer", "default": 2},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    with pytest.raises(QuintetError, match="'x' needs a type"):
        Tool.of(lambda x: x, "f")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CASES["MTU03"]["input"]["tool_call_text"], "no JSON"),
        (CASES["MTU09"]["input"]["tool_call_text"], "a list and no object"),
        ('{"arguments": {}}', "no name"),
        ('{"name": "add", "arguments": [1, 2]}', "arguments is a list"),
        ('{"name": "add", "arguments": "1"}', "arguments is a str"),
        ("", "no JSON"),
    ],
)
def test_a_call_that_does_not_parse_is_told_apart_with_its_reason(text: str, reason: str) -> None:
    _, (call,) = parse_tool_calls(f"Let me see. <tool_call>{text}</tool_call>")
    assert isinstance(call, Malformed) and reason in call.reason


def test_calls_are_parsed_in_order_and_the_text_around_them_is_kept() -> None:
    text, calls = parse_tool_calls('a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"name": "g"}</tool_call>')
    assert (text, calls) == ("a  b", [ToolCall("f", {}), ToolCall("g", {})])
    assert parse_tool_calls("plain ") == ("plain ", [])
    assert isinstance(parse_tool_calls("<tool_call>{")[1][0], Malformed)


def play(environment: ToolEnvironment, text: str, reason: FinishReason = FinishReason.STOP) -> Step:
    return asyncio.run(environment.step(Action(text, reason)))


def test_a_malformed_call_runs_no_tool_and_is_answered_with_the_reason() -> None:
    ran: list[int] = []

    def note(x: int = 0) -> int:
        ran.append(x)
        return x

    environment = ToolEnvironment([Tool.of(note)])
    step = play(
        environment, '<tool_call>[1,2]</tool_call><tool_call>{"name": "note", "arguments": {"x": 7}}</tool_call>'
    )
    assert ran == [7]
    assert (step.done, step.tool_calls, step.malformed_calls) == (False, 1, 1)
    assert [m["role"] for m in step.observation] == ["tool", "tool"]
    assert "no object" in step.observation[0]["content"] and step.observation[1]["content"] == "7"
    ended = play(
        ToolEnvironment([Tool.of(note)], on_malformed="end", malformed_reward=-1.0), "<tool_call>[1]</tool_call>"
    )
    assert (ended.done, ended.outcome, ended.reward) == (True, Outcome.MALFORMED, -1.0)
    assert ran == [7]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"a": "x"}', "a: Input should be a valid integer"),
        ("{}", "a: Field required"),
        ('{"a": 1, "c": 2}', "c: Extra inputs"),
    ],
)
def test_wrong_arguments_are_answered_and_not_run(arguments: str, said: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    step = play(ToolEnvironment([Tool.of(add)]), text)
    assert said in step.observation[0]["content"]
    assert (
        "no tool 'sub'" in play(ToolEnvironment([Tool.of(add)]), text.replace("add", "sub")).observation[0]["content"]
    )


def test_calls_in_tags_end_the_turn_and_get_their_text_back() -> None:
    environment = ToolEnvironment([Tool.of(calculator, "c")], format="tags")
    assert environment.stop == ("</c>",)
    assert play(environment, "hm <c>12*34</c>").observation == "[408]"
    assert play(environment, "<c>1<c>2+2</c>").observation == "[4]"
    assert play(environment, "<c>2+</c>").observation.startswith("[error: not an expression")
    assert play(environment, "2+2</c>").malformed_calls == 1
    assert play(environment, "<c>2+2").malformed_calls == 1
    assert play(environment, "408") == Step(done=True)
    assert play(environment, "40", FinishReason.LENGTH).outcome == Outcome.CONTEXT


def test_a_tools_exception_and_time_out_are_failures_of_its_host() -> None:
    def broken(x: int) -> int:
        raise KeyError("disk")

    async def slow(x: int) -> int:
        await asyncio.sleep(60)
        return x

    async def wrong(x: int) -> int:
        raise ToolError("x must be even")

    for function, kind in ((broken, FailureKind.ENVIRONMENT), (slow, FailureKind.TIMEOUT)):
        with pytest.raises(EnvironmentFailure) as caught:
            asyncio.run(Tool.of(function).call({"x": 1}, 0.05))
        assert caught.value.kind is kind
        assert function.__name__ in str(caught.value)
    call = '<tool_call>{"name": "wrong", "arguments": {"x": 1}}</tool_call>'
    assert play(ToolEnvironment([Tool.of(wrong)]), call).observation[0]["content"] == "error: x must be even"


def test_search_ranks_rare_words_above_common_ones(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    texts = ["the cat sat on the mat", "the dog barks", "a Zebra grazes; the zebra sleeps", "the the the"]
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    corpus = Corpus.read(path)
    assert corpus.search("the zebra", 2) == [texts[2], texts[3]]
    assert corpus.search("unicorn", 3) == []
    assert asyncio.run(search_tool(corpus, results=1).call({"query": "dog"}, 1.0)) == "the dog barks"
    (tmp_path / "bad.jsonl").write_text('{"no": 1}')
    with pytest.raises(QuintetError, match=r"bad\.jsonl cannot be read: KeyError"):
        Corpus.read(tmp_path / "bad.jsonl")


class FakeSandbox:
    """Remembers what it ran; `print(x)` prints x."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.ran: list[tuple[str, str | None]] = []
        self.starts = 0
        self.broken = False

    async def start(self) -> None:
        self.starts += 1

    async def create(self) -> str:
        self.live.add(f"s{len(self.ran)}")
        return f"s{len(self.ran)}"

    async def run(self, program: Program, limits: Limits, session: str | None = None) -> RunResult:
        if self.broken:
            raise SandboxFailure("no workers left")
        self.ran.append((program.code, session))
        if "crash" in program.code:
            return RunResult(RunOutcome.ERROR, "", "NameError: crash\n")
        return RunResult(RunOutcome.FINISHED, program.code.removeprefix("print(").removesuffix(")"), "")

    async def destroy(self, session: str) -> None:
        self.live.discard(session)

    async def close(self) -> None: ...


def test_python_runs_in_one_session_per_episode_and_a_sandbox_fault_is_a_failure() -> None:
    sandbox = FakeSandbox()

    async def started() -> Any:
        return sandbox

    async def program() -> None:
        tool = python_tool(started, Limits())
        assert await tool.call({"code": "print(7)"}, 1.0) == "7"
        assert await tool.call({"code": "crash"}, 1.0) == "NameError: crash\n[error]"
        assert {session for _, session in sandbox.ran} == sandbox.live
        assert tool.close is not None
        await tool.close()
        assert sandbox.live == set()
        sandbox.broken = True
        with pytest.raises(EnvironmentFailure) as caught:
            await tool.call({"code": "print(7)"}, 1.0)
        assert caught.value.kind is FailureKind.SANDBOX

    asyncio.run(program())


def test_a_recipes_tools_are_made_and_its_mistakes_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("first passage\n\nsecond passage")
    config = EnvironmentConfig(
        kind="tools",
        tools=[
            ToolConfig(fn="calculator", name="c"),
            ToolConfig(fn="search", args={"corpus": str(tmp_path / "notes.txt")}),
            ToolConfig(fn="python", args={"wall_s": 1.0}),
            ToolConfig(fn=f"{__name__}:add"),
        ],
        sandbox=f"{__name__}:FakeSandbox",
    )
    factory = EnvironmentFactory(config)
    environment = factory()
    assert [t["function"]["name"] for t in environment.tools or []] == ["c", "search", "python", "add"]
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(5)"}}</tool_call>'
    assert play(environment, call).observation[0]["content"] == "5"  # type: ignore[arg-type]
    for wrong, said in (
        ({"tools": [{"fn": "calculate"}]}, "neither calculator"),
        ({"tools": [{"fn": "no.module:f"}]}, "cannot be imported"),
        ({"tools": [{"fn": "search"}]}, "corpus"),
        ({"args": {"formt": "tags"}}, "formt"),
        ({"args": {"format": "xml"}}, "json or tags"),
        ({"kind": "gym:tests.rollout.test_tools:Nothing", "tools": []}, "has no 'Nothing'"),
        ({"kind": f"{__name__}:FakeSandbox", "tools": [], "args": {"x": 1}}, "takes no 'x'"),
    ):
        plain = {"kind": "tools", "tools": [{"fn": "calculator"}]}
        with pytest.raises(QuintetError, match=said):
            EnvironmentFactory(EnvironmentConfig.model_validate(plain | wrong))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"max_turns": 3}, "environment.kind"),
        ({"kind": "tools"}, "environment.tools"),
        ({"kind": "reasoning_gym", "tools": [{"fn": "calculator"}]}, "environment.tools"),
        ({"kind": "tools", "tools": [{"fn": "python"}]}, "environment.sandbox"),
        ({"kind": "tools", "tools": [{"fn": "calculator"}], "sandbox": "a:B"}, "environment.sandbox"),
        ({"kind": "agent:a:b", "turn_tokens": 4}, "environment.turn_tokens"),
    ],
)
def test_options_that_contradict_or_do_nothing_are_named(options: dict, key: str) -> None:
    problem = environment_problem(EnvironmentConfig.model_validate(options))
    assert problem is not None and problem[0] == key


def test_options_in_order_are_no_problem() -> None:
    config = EnvironmentConfig.model_validate({"kind": "tools", "tools": [{"fn": "calculator"}]})
    assert environment_problem(config) is None
    assert environment_problem(EnvironmentConfig()) is None

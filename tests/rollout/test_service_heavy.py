"""Whole programs: servers that are loaded, killed and drained; fuzzed; a foreign agent framework."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import pytest

from quintet.rollout.http import HttpRolloutWorker
from quintet.rollout.routed import RoutedRolloutWorker
from quintet.rollout.router import LoadBalancer
from quintet.types import Group, GroupId, Prompt, Rollout, SamplingParams
from tests.rollout.service_load import ROOT, ServerProcess
from tests.rollout.serving_models import KEY, chat_tokenizer, make_server, random_model, serving

pytestmark = pytest.mark.heavy

SESSIONS, TURNS, TOKENS = 300, 5, 8


@pytest.fixture
def servers(tmp_path: Path):
    made = [
        ServerProcess(
            tmp_path / f"server-{i}.log", "--set", "model.tiny.layers=2", "--set", "cluster.threads=1", key=KEY
        )
        for i in range(3)
    ]
    try:
        for server in made:
            server.wait_ready()
        yield made
    finally:
        for server in made:
            server.close()


async def session(worker: RoutedRolloutWorker, name: str, times: list[float]) -> list[Rollout]:
    """A conversation in tokens: each turn's prompt is everything before and three tokens of its own."""
    ids, turns = [3 + len(name) % 7], []
    for turn in range(TURNS):
        group = Group(GroupId(name), Prompt(name, ids))
        params = SamplingParams(max_tokens=TOKENS, first_position=turn * TOKENS)
        began = time.monotonic()
        (rollout,) = await worker.generate([group], params, 0)
        times.append(time.monotonic() - began)
        turns.append(rollout)
        ids = [*ids, *rollout.response_ids, 5, 6, 7]
    return turns


def test_three_hundred_sessions_survive_a_killed_and_a_drained_server(servers, capsys) -> None:
    urls = [server.url for server in servers]
    times: list[float] = []
    memory: list[float] = []

    async def program() -> list[list[list[Rollout]]]:
        balancer = LoadBalancer(retry_after_s=1e6, patience_s=300.0)
        workers = {url: HttpRolloutWorker(url, key=KEY) for url in urls}
        worker = RoutedRolloutWorker(workers, balancer, decode=str, eos_ids=[1], attempts=4)

        async def disturb() -> None:
            while len(times) < SESSIONS // 2:
                await asyncio.sleep(0.01)
            servers[0].kill()
            await balancer.drain(urls[1])

        rounds = []
        for number in range(3):
            disturbing = asyncio.ensure_future(disturb()) if number == 0 else None
            names = [f"r{number}-s{i}" for i in range(SESSIONS)]
            rounds.append(await asyncio.gather(*(session(worker, name, times) for name in names)))
            if disturbing is not None:
                await disturbing
            memory.append(servers[2].rss_mb())
        status = {w.name: w for w in balancer.status()}
        assert [status[url].in_flight for url in urls] == [0, 0, 0]
        assert [status[url].state.value for url in urls] == ["down", "draining", "up"]
        await worker.close()
        return rounds

    rounds = asyncio.run(program())
    for sessions in rounds:
        assert len(sessions) == SESSIONS
        for turns in sessions:
            assert [r.failure for r in turns] == [None] * TURNS
            for before, after in pairwise(turns):  # each turn recorded once, none lost
                assert after.prompt_ids == [*before.prompt_ids, *before.response_ids, 5, 6, 7]
            assert all(len(r.logprobs) == len(r.response_ids) <= TOKENS for r in turns)
    assert memory[2] - memory[1] < 20.0, f"memory grew: {memory}"
    p99 = quantiles(times, n=100)[98]
    with capsys.disabled():
        print(f"\n{len(times)} turns: p50 {median(times):.2f} s, p99 {p99:.2f} s; server memory {memory} MB")


def test_a_killed_servers_samples_equal_an_undisturbed_servers(servers) -> None:
    """Greedy or not: the draws are keyed, so that the retried rest is what the dead server would have said."""
    urls = [server.url for server in servers]

    async def program(kill: bool) -> list[list[int]]:
        workers = {url: HttpRolloutWorker(url, key=KEY) for url in urls[:2]}
        balancer = LoadBalancer(retry_after_s=1e6)
        worker = RoutedRolloutWorker(workers, balancer, decode=str, eos_ids=[1])
        groups = [Group(GroupId(f"k{i}"), Prompt(f"k{i}", [3, 4 + i])) for i in range(8)]
        told = 0

        def on_token(_) -> None:
            nonlocal told
            told += 1
            if kill and told == 60:
                servers[0].kill()

        rollouts = await worker.generate(groups, SamplingParams(max_tokens=60, n=2), 0, on_token=on_token)
        await worker.close()
        assert [r.failure for r in rollouts] == [None] * 16
        return [r.response_ids for r in rollouts]

    undisturbed = asyncio.run(program(kill=False))
    disturbed = asyncio.run(program(kill=True))
    assert servers[0].process.poll() is not None
    same = sum(a == b for a, b in zip(undisturbed, disturbed, strict=True))
    assert same >= 15  # fast numerics: a last bit may tip one draw


def test_schemathesis_finds_nothing_wrong_with_the_api(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    tokenizer = chat_tokenizer()
    with serving(make_server(random_model(tokenizer), tokenizer, weights_root=tmp_path)) as url:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        options = ["-H", f"Authorization: Bearer {KEY}", "--checks", checks, "--max-examples", "40", "--seed", "1"]
        # a paused server answers nothing that is generated; pausing has tests of its own
        options += ["--exclude-path", "/pause", "--phases", "examples,fuzzing", "--request-timeout", "30"]
        found = subprocess.run([*command, *options], capture_output=True, text=True, timeout=550, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]


def test_the_openai_agents_framework_trains_unchanged() -> None:
    agents = pytest.importorskip("agents")
    import openai

    from quintet.models.config import ModelConfig
    from quintet.models.tokenizer import PromptEncoder
    from quintet.rollout.agents import AgentRolloutWorker, AgentTask
    from quintet.rollout.config import EnvironmentConfig
    from tests.rollout.serving_models import CALL, END, make_worker, scripted_model
    from tests.rollout.test_tools import add

    agents.set_tracing_disabled(True)
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"\n": CALL}, context=4000)

    async def program(task: AgentTask) -> float:
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        chat = agents.OpenAIChatCompletionsModel(model=task.model, openai_client=client)
        agent = agents.Agent(name="adder", instructions="add", tools=[agents.function_tool(add)], model=chat)
        try:
            await agents.Runner.run(agent, task.messages, max_turns=3)
        except agents.MaxTurnsExceeded:
            return 0.5
        return 1.0

    async def run() -> Rollout:
        worker = AgentRolloutWorker(
            make_worker(model, tokenizer),
            program,
            tokenizer=tokenizer,
            encoder=PromptEncoder(tokenizer, ModelConfig()),
            config=EnvironmentConfig(kind="agent:x:y"),
            context=4000,
        )
        try:
            group = Group(GroupId("p"), Prompt("p", [1], text="1+2?"))
            return (await worker.generate([group], SamplingParams(max_tokens=10), 0))[0]
        finally:
            await worker.close()

    rollout = asyncio.run(run())
    assert rollout.failure is None, rollout.failure
    assert rollout.episode is not None and rollout.episode.reward == 0.5
    own = [i for i, m in zip(rollout.response_ids, rollout.loss_mask, strict=True) if m]
    assert rollout.turns == 3 and tokenizer.decode_all(own) == f"{CALL}{END}" * 3
    assert f"<|im_start|>tool\n3{END}" in tokenizer.decode_all(rollout.response_ids)


def test_smollm2s_recorded_sessions_agree_with_the_trainer() -> None:
    """A real model and its own chat template, float32, through the official client."""
    from quintet.cluster.build import load_policy
    from quintet.cluster.serving import gateway
    from quintet.config import load_config
    from quintet.rollout.http_app import HttpService
    from quintet.types import Experience
    from tests.rollout.test_gateway import ask, open_session, trainer, user

    config = load_config({"model": {"name": "builtin:smollm2-135m"}}, training=False)
    served = gateway(config, key="admin")
    service = HttpService(served.app())
    service.start()
    try:
        for question in ("What is 2 + 3?", "Name a colour."):
            _, client = open_session(service.url)
            messages = [user(question)]
            for _ in range(3):
                choice = ask(client, messages, max_tokens=10, model=served.model)
                messages += [choice.message.model_dump(), user("And another one?")]
        rollouts = [segment.rollout for session in served.all() for segment in session.segments()]
    finally:
        service.close()
    assert [r.turns for r in rollouts] == [3, 3]
    samples = [
        Experience(r.group_id, 0, r.prompt_ids, r.response_ids, r.logprobs, r.loss_mask, 1.0, 0) for r in rollouts
    ]

    async def recompute() -> list[list[float]]:
        await served.worker.close()
        train = trainer(load_policy(config.model), served.tokenizer)
        try:
            return await train.logprobs(samples)
        finally:
            await train.close()

    for rollout, again in zip(rollouts, asyncio.run(recompute()), strict=True):
        own = [i for i, mask in enumerate(rollout.loss_mask) if mask]
        assert len(own) <= 30
        assert max(abs(rollout.logprobs[i] - again[i]) for i in own) <= 1e-4


def test_a_tiny_model_learns_to_use_a_tool(tmp_path: Path) -> None:
    import quintet

    result = quintet.train(ROOT / "recipes" / "tool_tiny.yaml", out=tmp_path / "run")
    before, after = result.summary["eval/accuracy_before"], result.summary["eval/accuracy_after"]
    assert after >= 0.85 and after - before >= 0.5, (before, after)

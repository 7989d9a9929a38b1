"""The gateway: the official client talks, and what is trained is token for token what was sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import resolve
from quintet.clock import VirtualClock
from quintet.rollout.engine.sequence import OnToken
from quintet.rollout.gateway import Gateway
from quintet.rollout.openai_api import ApiError, ChatRequest
from quintet.rollout.sessions import Session, SessionState
from quintet.rollout.transcript import Transcript
from quintet.serving import ThreadedServer
from quintet.train.config import TrainConfig
from quintet.train.worker import LocalTrainWorker
from quintet.types import Experience, GroupId, Rollout, SamplingParams, VersionRun
from quintet.weights.memory import MemoryStore
from tests.rollout.serving_models import END, MODEL, chat_tokenizer, make_worker, random_model, scripted_model

ADMIN = {"Authorization": "Bearer admin"}


class Tape:
    """Keeps what a worker really sampled, to compare the records with."""

    def __init__(self, worker) -> None:
        self.worker = worker
        self.rollouts: list[Rollout] = []

    async def generate(self, prompts, params, version, *, on_token: OnToken | None = None) -> list[Rollout]:
        rollouts = await self.worker.generate(prompts, params, version, on_token=on_token)
        self.rollouts += rollouts
        return rollouts

    def __getattr__(self, name: str):
        return getattr(self.worker, name)


def make_gateway(worker, tokenizer, **options) -> Gateway:
    return Gateway(worker, tokenizer, model=MODEL, key="admin", context=512, **options)


@pytest.fixture(scope="module")
def tape() -> Iterator[Tape]:
    tokenizer = chat_tokenizer()
    worker = make_worker(random_model(tokenizer), tokenizer)
    yield Tape(worker)
    asyncio.run(worker.close())


@pytest.fixture(scope="module")
def url(tape: Tape) -> Iterator[str]:
    service = ThreadedServer(make_gateway(tape, chat_tokenizer()).app())
    service.start()
    yield service.url
    service.close()


def open_session(url: str, **body) -> tuple[str, openai.OpenAI]:
    made = httpx.post(f"{url}/rl/sessions", json=body, headers=ADMIN).json()
    assert made["base_url"] == f"{url}/v1"
    return made["id"], openai.OpenAI(base_url=made["base_url"], api_key=made["api_key"], max_retries=0)


def export(url: str, session: str) -> dict:
    return httpx.get(f"{url}/rl/sessions/{session}/export", headers=ADMIN).json()


def ask(client: openai.OpenAI, messages: list, **options):
    wanted = {"model": MODEL, "max_tokens": 8} | options
    return client.chat.completions.create(messages=messages, **wanted).choices[0]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answered(text: str) -> dict:
    return {"role": "assistant", "content": text}


# -- an agent over HTTP ------------------------------------------------------------------------------


def test_an_unmodified_agent_is_recorded_token_for_token(url: str, tape: Tape) -> None:
    session, client = open_session(url)
    before, messages = len(tape.rollouts), [user("undo 123")]
    for turn in range(3):
        choice = ask(client, messages)
        messages += [choice.message.model_dump(), user(f"more aaaa {turn}")]
    sampled = tape.rollouts[before:]
    found = export(url, session)
    (segment,) = found["segments"]
    rollout = segment["rollout"]
    trained = [i for i, mask in zip(rollout["response_ids"], rollout["loss_mask"], strict=True) if mask]
    assert trained == [i for r in sampled for i in r.response_ids]
    # the last prompt, as the engine saw it, is the record's own beginning
    whole = rollout["prompt_ids"] + rollout["response_ids"]
    assert whole == sampled[-1].prompt_ids + sampled[-1].response_ids
    logprobs = [p for p, mask in zip(rollout["logprobs"], rollout["loss_mask"], strict=True) if mask]
    assert logprobs == [p for r in sampled for p in r.logprobs]
    assert rollout["turns"] == 3


def test_a_streamed_call_is_recorded_as_well_and_one_that_broke_off_is_not(url: str) -> None:
    session, client = open_session(url)
    stream = client.chat.completions.create(model=MODEL, messages=[user("a")], max_tokens=6, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert [t["text"] for t in export(url, session)["record"]["turns"]] == [text]
    broken = client.chat.completions.create(model=MODEL, messages=[user("b")], max_tokens=400, stream=True)
    next(iter(broken))
    broken.close()
    assert len(export(url, session)["record"]["turns"]) == 1


def test_the_reward_finishes_a_session_and_only_its_own(url: str) -> None:
    first, client = open_session(url)
    second, _ = open_session(url)
    ask(client, [user("x")])
    assert client.post("/../rl/reward", body={"reward": 0.5}, cast_to=dict)["state"] == "finished"
    for response in (
        httpx.post(f"{url}/rl/reward", json={"reward": 1}, headers={"Authorization": f"Bearer {client.api_key}"}),
        httpx.post(
            f"{url}/v1/chat/completions",
            json={"model": MODEL, "messages": [user("x")]},
            headers={"Authorization": f"Bearer {client.api_key}"},
        ),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (409, "session_not_open")
    listed = {s["id"]: s for s in httpx.get(f"{url}/rl/sessions", headers=ADMIN).json()["sessions"]}
    assert (listed[first]["state"], listed[first]["reward"], listed[first]["turns"]) == ("finished", 0.5, 1)
    assert listed[second]["state"] == "open"
    assert export(url, second)["record"]["turns"] == []
    assert httpx.delete(f"{url}/rl/sessions/{first}", headers=ADMIN).json()["reward"] == 0.5
    assert httpx.get(f"{url}/rl/sessions/{first}", headers=ADMIN).status_code == 404
    with pytest.raises(openai.AuthenticationError):  # its key went with it
        ask(client, [user("x")])


def test_a_sessions_key_opens_nothing_else(url: str) -> None:
    session, client = open_session(url)
    auth = {"Authorization": f"Bearer {client.api_key}"}
    assert httpx.get(f"{url}/rl/sessions", headers=auth).status_code == 401
    assert httpx.get(f"{url}/rl/sessions/{session}/export", headers=auth).status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=ADMIN).status_code == 401
    assert httpx.get(f"{url}/rl/sessions/nope", headers=ADMIN).status_code == 404
    assert httpx.post(f"{url}/rl/reward", content=b'{"reward": NaN}', headers=auth | JSON).status_code == 400


JSON = {"Content-Type": "application/json"}


def test_an_exported_session_goes_on_in_another_gateway(url: str, tape: Tape) -> None:
    session, client = open_session(url, group_id="p/e1.o0.a0", sample_index=3)
    messages = [user("undo")]
    messages += [ask(client, messages).message.model_dump(), user("again")]
    data = export(url, session)
    service = ThreadedServer(make_gateway(tape, chat_tokenizer()).app())
    service.start()
    try:
        same, client = open_session(service.url, restore=data["record"])
        assert same == session
        ask(client, messages)
        turns = export(service.url, same)["record"]["turns"]
        assert [t["parent"] for t in turns] == [None, 0]
        assert turns[0] == data["record"]["turns"][0]
        damaged = data["record"] | {"id": "x", "turns": [data["record"]["turns"][0] | {"logprobs": []}]}
        body = {"restore": damaged}
        assert httpx.post(f"{service.url}/rl/sessions", json=body, headers=ADMIN).status_code == 400
    finally:
        service.close()


# -- without HTTP ------------------------------------------------------------------------------------


async def call(gateway: Gateway, session: Session, messages: list, **options) -> dict:
    """One call as the routes make it; the assistant's message."""
    request = ChatRequest(model=MODEL, messages=messages, **({"max_tokens": 8} | options))
    job = await gateway.chat_job(session.key, request)
    rollouts = await gateway.worker.generate(job.groups, job.params, 0)
    made = [{"role": "assistant", "content": r.text} for r in rollouts]
    job.finish(rollouts, made)
    job.close()
    return made[0]


def test_idle_sessions_expire_and_can_be_resumed_with_all_they_had(tape: Tape) -> None:
    clock = VirtualClock()
    gateway = make_gateway(tape, chat_tokenizer(), clock=clock, timeout_s=60.0)

    async def program() -> None:
        session = gateway.open()
        waiting = asyncio.ensure_future(gateway.wait(session))
        await clock.sleep(59.0)
        assert gateway.find(session.record.id).record.state is SessionState.OPEN
        gateway._session(session.key)  # a sign of life
        await clock.sleep(59.0)
        assert session.record.state is SessionState.OPEN
        assert await waiting is SessionState.EXPIRED
        assert clock.now() == pytest.approx(119.0, abs=0.1)
        with pytest.raises(ApiError, match="the session is expired"):
            await gateway.chat_job(session.key, ChatRequest(model=MODEL, messages=[user("x")]))
        gateway.resume(session)
        await gateway.chat_job(session.key, ChatRequest(model=MODEL, messages=[user("x")]))
        await clock.sleep(1000.0)  # the call is still open: not idle
        gateway.expire()
        assert session.record.state is SessionState.OPEN

    clock.run(program())


def test_an_edited_history_starts_a_segment_that_trains_no_token_twice(tape: Tape) -> None:
    gateway = make_gateway(tape, chat_tokenizer())

    async def program() -> Session:
        session = gateway.open()
        a1 = await call(gateway, session, [user("one")])
        a2 = await call(gateway, session, [user("one"), a1, user("two")])
        await call(gateway, session, [user("one"), a1, user("two"), a2, user("three")])
        await call(gateway, session, [user("one"), a1, user("TWO")])  # edited after the first answer
        await call(gateway, session, [user("another start")])
        return session

    session = asyncio.run(program())
    t = session.record.turns
    assert [turn.parent for turn in t] == [None, 0, 1, 0, None]
    first, second, third = session.segments()
    assert (first.turns, second.turns, third.turns) == ([0, 1, 2], [3], [4])
    assert second.rollout.prompt_ids == [*session.path_ids(t[0]), *t[3].context_ids]
    assert second.rollout.response_ids == t[3].ids
    assert len(session.path_ids(t[0])) <= second.shared_prefix < len(second.rollout.prompt_ids)
    trained = sum(sum(s.rollout.loss_mask) for s in (first, second, third))
    assert trained == sum(len(turn.ids) for turn in t)
    assert session.main_rollout() == first.rollout


def test_the_same_request_twice_gives_two_answers_that_are_both_kept(tape: Tape) -> None:
    gateway = make_gateway(tape, chat_tokenizer())

    async def program() -> Session:
        session = gateway.open()
        for _ in range(2):
            await call(gateway, session, [user("one")], max_tokens=20)
        return session

    first, second = asyncio.run(program()).segments()
    assert first.rollout.response_ids != second.rollout.response_ids
    assert first.rollout.prompt_ids == second.rollout.prompt_ids


def test_what_clients_do_to_messages_is_no_edit(tape: Tape) -> None:
    tokenizer = chat_tokenizer()
    gateway = make_gateway(tape, tokenizer)
    tools = [{"type": "function", "function": {"name": "add"}}]
    call_ = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}

    async def program() -> None:
        session = gateway.open()
        match = session.match(tokenizer, [user("x")], tools)
        rollout = Rollout(GroupId("p"), 0, [], [5, 6], " hm ", [-1.0, -1.0], [1, 1], [VersionRun(0, 2)], "stop")
        session.add(match, rollout, {"role": "assistant", "content": None, "tool_calls": [call_]}, 1.0)
        respelt = call_ | {"function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
        answer = {"role": "assistant", "content": "", "refusal": None, "audio": None, "tool_calls": [respelt]}
        reply = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]}
        again = session.match(tokenizer, [user("x"), answer, reply], tools)
        assert again.turn is session.record.turns[0]
        assert again.prompt_ids[: len(match.prompt_ids) + 2] == [*match.prompt_ids, 5, 6]
        assert tokenizer.decode_all(again.new_ids).startswith(f"{END}\n<|im_start|>tool\n3{END}")
        assert session.match(tokenizer, [user("x"), answer, reply], None).turn is None  # other tools: another prompt

    asyncio.run(program())


def test_an_end_id_that_was_sampled_is_not_written_a_second_time() -> None:
    tokenizer = chat_tokenizer()
    worker = make_worker(scripted_model(tokenizer, {"\n": "x", "x": "y"}), tokenizer)
    gateway = make_gateway(worker, tokenizer)

    async def program() -> Session:
        session = gateway.open()
        answer = await call(gateway, session, [user("q")])
        assert answer["content"] == "xy"
        await call(gateway, session, [user("q"), answer, user("r")], max_tokens=1)  # cut before its end
        await call(gateway, session, [user("q"), answer, user("r"), answered("x"), user("s")])
        await worker.close()
        return session

    session = asyncio.run(program())
    last = session.record.turns[-1]
    text = tokenizer.decode_all(session.path_ids(last))
    chat = [user("q"), answered("xy"), user("r"), answered("x"), user("s")]
    assert text == tokenizer.decode_all(tokenizer.encode_chat(chat)) + "xy" + END
    (segment,) = session.segments()
    marks = [i for i, m in zip(segment.rollout.response_ids, segment.rollout.loss_mask, strict=True) if m]
    assert tokenizer.decode_all(marks) == "xy" + END + "x" + "xy" + END  # the template's own end after "x" is no sample


def test_a_run_decides_over_temperature_truncation_and_seed(tape: Tape) -> None:
    gateway = make_gateway(tape, chat_tokenizer())
    run = SamplingParams(temperature=1.0, max_tokens=5, seed=9)

    async def program() -> SamplingParams:
        session = gateway.open(GroupId("p"), 2, sampling=run)
        request = ChatRequest(model=MODEL, messages=[user("x")], temperature=0.1, top_p=0.5, max_tokens=100, seed=1)
        return (await gateway.chat_job(session.key, request)).params

    params = asyncio.run(program())
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (1.0, 1.0, 9, 5)


def test_a_turn_without_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens came with 0 log-probabilities"):
        Transcript([1]).add_sampled([2, 3], [], [0, 0])


# -- five hundred sessions ---------------------------------------------------------------------------


def experience(session: Session) -> Experience:
    """A session's main rollout, as the trainer takes it."""
    r = session.main_rollout()
    return Experience(r.group_id, 0, r.prompt_ids, r.response_ids, r.logprobs, r.loss_mask, 1.0, 0)


def trainer(model, tokenizer, *, temperature: float = 1.0) -> LocalTrainWorker:
    return LocalTrainWorker(
        model,
        tokenizer=tokenizer,
        config=TrainConfig(lr=0.0, old="trainer"),
        algorithm=resolve(AlgorithmConfig(preset="grpo")),
        temperature=temperature,
        total_steps=1,
        dtype=torch.float32,
        store=MemoryStore(),
    )


def test_five_hundred_sessions_train_exactly_what_was_sampled() -> None:
    tokenizer = chat_tokenizer()
    chain = {"\n": "u", "u": "n", "n": "d", "d": "o", "o": "u", "1": "2", "x": "1"}  # "undo" in four ids, not in one
    model = scripted_model(tokenizer, chain, noise=0.02)
    worker = Tape(make_worker(model, tokenizer, max_running=256))
    gateway = make_gateway(worker, tokenizer)

    async def agent(index: int) -> Session:
        draw = random.Random(index)
        session = gateway.open(GroupId(f"p{index}"))
        messages = [user("undo" if index % 2 else "x" * draw.randint(1, 9))]
        for _ in range(draw.randint(2, 4)):
            answer = await call(gateway, session, messages, max_tokens=draw.randint(2, 6))
            messages += [answer, user(draw.choice(["undo aaaa", "123", "go on"]))]
        return session

    async def program() -> tuple[list[Session], list[list[float]]]:
        sessions = await asyncio.gather(*(agent(i) for i in range(500)))
        await worker.close()
        train = trainer(model, tokenizer)
        recomputed = await train.logprobs([experience(s) for s in sessions])
        await train.close()
        return sessions, recomputed

    sessions, recomputed = asyncio.run(program())
    sampled: dict[str, list[Rollout]] = {}
    for rollout in worker.rollouts:
        sampled.setdefault(rollout.group_id.prompt_id, []).append(rollout)
    reencoded_differently, largest = 0, 0.0
    for session, again in zip(sessions, recomputed, strict=True):
        (segment,) = session.segments()
        rollout, own = segment.rollout, sampled[session.record.group_id.prompt_id]
        last = own[-1]
        assert rollout.prompt_ids + rollout.response_ids == last.prompt_ids + last.response_ids
        masked = [i for i, mask in zip(rollout.response_ids, rollout.loss_mask, strict=True) if mask]
        assert masked == [i for r in own for i in r.response_ids]
        places = [i for i, mask in enumerate(rollout.loss_mask) if mask]
        largest = max([largest, *(abs(rollout.logprobs[i] - again[i]) for i in places)])
        ids = [i for r in own for i in r.response_ids if i not in tokenizer.eos_ids]
        reencoded_differently += tokenizer.encode(tokenizer.decode_all(ids)) != ids
    assert largest <= 1e-4
    assert reencoded_differently > 100  # the test would see a re-encoding

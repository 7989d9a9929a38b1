"""Programs written for OpenAI's API as rollout workers, unchanged."""

from __future__ import annotations

import asyncio
import time

import openai

from quintet.models.config import ModelConfig
from quintet.models.tokenizer import PromptEncoder
from quintet.rollout.agents import Agent, AgentRolloutWorker, AgentTask
from quintet.rollout.config import EnvironmentConfig
from quintet.types import FailureKind, Group, GroupId, Prompt, Rollout, SamplingParams
from tests.rollout.serving_models import chat_tokenizer, make_worker, random_model


def chatty(task: AgentTask) -> float:
    """Two turns with the official client; the reward is the length of what it heard."""
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
    messages = list(task.messages)
    for _ in range(2):
        reply = client.chat.completions.create(model=task.model, messages=messages, temperature=0.3, max_tokens=9)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
    return float(len(messages))


async def chatty_and_async(task: AgentTask) -> float | None:
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    if task.sample == 1:
        raise RuntimeError("the agent's own bug")
    await client.chat.completions.create(model=task.model, messages=task.messages)
    await client.post("/../rl/reward", body={"reward": 0.25}, cast_to=dict)
    return None


def silent(task: AgentTask) -> float:
    return 1.0


def slow(task: AgentTask) -> float:
    time.sleep(0.6)
    return 1.0


def endless(task: AgentTask) -> float:
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
    messages = list(task.messages)
    while True:
        reply = client.chat.completions.create(model=task.model, messages=messages, max_tokens=20)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "x" * 150}]


def play(agent: Agent, params: SamplingParams, **options) -> list[Rollout]:
    tokenizer = chat_tokenizer()
    model = random_model(tokenizer)

    async def program() -> list[Rollout]:
        worker = AgentRolloutWorker(
            make_worker(model, tokenizer),
            agent,
            tokenizer=tokenizer,
            encoder=PromptEncoder(tokenizer, ModelConfig()),
            config=EnvironmentConfig(kind="agent:x:y", **options),
            context=512,
        )
        try:
            return await worker.generate([Group(GroupId("p"), Prompt("p", [1], text="hello"))], params, 0)
        finally:
            await worker.close()

    return asyncio.run(program())


def test_an_unmodified_agent_gives_trainable_rollouts_under_the_runs_sampling() -> None:
    rollouts = play(chatty, SamplingParams(n=3, max_tokens=6, seed=1))
    assert [r.sample_index for r in rollouts] == [0, 1, 2]
    assert all(r.episode is not None and r.episode.reward == 5.0 and r.turns == 2 for r in rollouts)
    assert all(0 < sum(r.loss_mask) <= 12 for r in rollouts)  # 6 a turn: the run's limit, not the agent's 9
    assert len({tuple(r.response_ids) for r in rollouts}) == 3
    again = play(chatty, SamplingParams(n=3, max_tokens=6, seed=1))
    assert [r.response_ids for r in again] == [r.response_ids for r in rollouts]


def test_one_agent_that_raises_is_a_failure_and_the_others_keep_the_reward_they_posted() -> None:
    first, second = play(chatty_and_async, SamplingParams(n=2, max_tokens=4))
    assert first.failure is None and first.episode is not None and first.episode.reward == 0.25
    assert second.failure is not None
    assert (second.failure.kind, second.failure.message) == (
        FailureKind.ENVIRONMENT,
        "the agent raised RuntimeError: the agent's own bug",
    )


def test_outgrowing_the_context_is_the_policys_doing_and_worth_nothing() -> None:
    (rollout,) = play(endless, SamplingParams(max_tokens=20))
    assert rollout.failure is None and rollout.turns >= 2
    assert rollout.episode is not None
    assert (rollout.episode.outcome, rollout.episode.reward) == ("context", 0.0)


def test_an_agent_that_says_nothing_or_takes_too_long_is_a_failure() -> None:
    (quiet,) = play(silent, SamplingParams())
    assert quiet.failure is not None and "made no call" in quiet.failure.message
    (late,) = play(slow, SamplingParams(), timeout_s=0.2)
    assert late.failure is not None and late.failure.kind is FailureKind.TIMEOUT

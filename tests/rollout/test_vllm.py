"""The real vLLM on a CPU (`make vllm-env`, then `make test-vllm`): what it samples, new weights, and its death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch

from quintet.models.config import ModelConfig
from quintet.models.loader import load_model, load_tokenizer
from quintet.models.tokenizer import PromptEncoder
from quintet.rollout.config import RolloutConfig
from quintet.rollout.gateway import Gateway
from quintet.rollout.sessions import Session
from quintet.rollout.vllm import VllmRolloutWorker
from quintet.types import FinishReason, Group, GroupId, Prompt, QuintetError, Rollout, SamplingParams
from quintet.weights.memory import MemoryStore
from tests.rollout.serving_models import MODEL
from tests.rollout.test_gateway import Tape, call, experience, trainer, user

PYTHON = Path(os.environ.get("QUINTET_VLLM_PYTHON", ".venv-vllm/bin/python"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: make vllm-env"),
]
SMOLLM2 = ModelConfig(name="builtin:smollm2-135m")
HOT = 1.3
LONG = SamplingParams(n=4, max_tokens=200, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model():
    return load_model(SMOLLM2, seed=0)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def worker(model, loop) -> Iterator[VllmRolloutWorker]:
    config = RolloutConfig.model_validate(
        {"engine": "vllm", "vllm": {"python": str(PYTHON), "args": ["--enforce-eager"], "cpu_kv_gb": 1}}
    )
    tokenizer = load_tokenizer(SMOLLM2)
    made = VllmRolloutWorker(
        model.config,
        {name: p.clone() for name, p in model.state_dict().items()},
        eos_ids=tokenizer.eos_ids,
        decode=tokenizer.decode,
        config=config,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    yield made
    loop.run_until_complete(made.close())


def group(name: str, question: str) -> Group:
    encode = PromptEncoder(load_tokenizer(SMOLLM2), SMOLLM2)
    return Group(GroupId(name), Prompt(name, encode(None, question)))


def logprobs(model, rollout: Rollout, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0].float() / temperature
    rows = logits.log_softmax(-1)[len(rollout.prompt_ids) - 1 : -1]
    return rows.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]


def greedy(model, prompt_ids: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return out[0, len(prompt_ids) :].tolist()


def nudged(model) -> dict[str, torch.Tensor]:
    """Other weights of the same model: the last layer's are half as large."""
    return {n: p.clone() * (0.5 if ".29." in n and "proj" in n else 1.0) for n, p in model.state_dict().items()}


def test_its_log_probabilities_are_those_of_the_sampling_distribution(worker, model, loop) -> None:
    params = SamplingParams(n=3, max_tokens=24, temperature=0.7, seed=1)
    rollouts = loop.run_until_complete(worker.generate([group("a", "What is 3 + 4?")], params, 0))
    assert [r.sample_index for r in rollouts] == [0, 1, 2] and len({tuple(r.response_ids) for r in rollouts}) > 1
    for rollout in rollouts:
        assert rollout.failure is None and rollout.loss_mask == [1] * len(rollout.response_ids)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), logprobs(model, rollout, 0.7), atol=2e-4, rtol=0)


def test_sessions_through_the_gateway_are_what_vllm_sampled_and_the_trainer_computes(
    worker, model, loop, capsys: pytest.CaptureFixture[str]
) -> None:
    """Multi-turn, hot enough that many an answer's text would be encoded to other ids than were sampled."""
    tokenizer = load_tokenizer(SMOLLM2)
    tape = Tape(worker)
    gateway = Gateway(tape, tokenizer, model=MODEL, key="admin", context=2048)

    async def agent(index: int) -> Session:
        session = gateway.open(GroupId(f"g{index}"))
        messages = [user(f"Tell me about the number {index}.")]
        for _ in range(3):
            answer = await call(gateway, session, messages, max_tokens=12, temperature=HOT)
            messages += [answer, user("And then?")]
        return session

    async def program() -> tuple[list[Session], list[list[float]]]:
        sessions = list(await asyncio.gather(*(agent(i) for i in range(12))))
        train = trainer(model, tokenizer, temperature=HOT)
        recomputed = await train.logprobs([experience(s) for s in sessions])
        await train.close()
        return sessions, recomputed

    sessions, recomputed = loop.run_until_complete(program())
    differences: list[float] = []
    reencoded_differently = 0
    for session, again in zip(sessions, recomputed, strict=True):
        rollout, own = session.main_rollout(), [r for r in tape.rollouts if r.group_id == session.record.group_id]
        assert rollout is not None and rollout.turns == len(own) == 3
        places = [i for i, mask in enumerate(rollout.loss_mask) if mask]
        assert [rollout.response_ids[i] for i in places] == [i for r in own for i in r.response_ids]
        assert rollout.prompt_ids + rollout.response_ids == own[-1].prompt_ids + own[-1].response_ids
        differences += [abs(rollout.logprobs[i] - again[i]) for i in places]
        words = [[i for i in r.response_ids if i not in tokenizer.eos_ids] for r in own]
        reencoded_differently += sum(tokenizer.encode(tokenizer.decode_all(ids)) != ids for ids in words)
    with capsys.disabled():
        print(
            f"\n{len(differences)} tokens, mean |difference| {fmean(differences):.2e}, max {max(differences):.2e}; "
            f"{reencoded_differently} of 36 answers would be encoded differently"
        )
    assert fmean(differences) < 2e-5 and max(differences) < 5e-4
    assert reencoded_differently > 0  # else a re-encoding would go unnoticed


def test_stop_strings_and_lengths_end_a_sample(worker, loop) -> None:
    one = group("b", "Count from 1 to 9, with commas.")
    cut = SamplingParams(n=1, max_tokens=60, temperature=0.0, stop=(",",))
    short = SamplingParams(n=1, max_tokens=3, temperature=0.0)
    by_string, by_length = (loop.run_until_complete(worker.generate([one], p, 0))[0] for p in (cut, short))
    assert by_string.finish_reason is FinishReason.STOP and "," not in by_string.text
    assert by_length.finish_reason is FinishReason.LENGTH and len(by_length.response_ids) == 3


def test_new_weights_reach_running_samples_and_leave_no_old_cache(worker, model, loop) -> None:
    """A sample in flight goes on with the new version; afterwards greedy output is a fresh model's."""
    one = group("c", "Tell me a long story about a dog.")
    weights = nudged(model)
    store = MemoryStore()  # a reference is good for as long as its store
    ref = store.publish(weights, 1)

    async def both() -> tuple[list[Rollout], list[Rollout]]:
        running = asyncio.create_task(worker.generate([one], LONG, 0))
        await asyncio.sleep(2.0)
        await worker.update_weights(ref, 1)
        after = await worker.generate([one], SamplingParams(n=1, max_tokens=20, temperature=0.0), 1)
        return await running, after

    across, after = loop.run_until_complete(both())
    assert any([run.version for run in r.weight_versions] == [0, 1] for r in across)
    fresh = load_model(SMOLLM2, seed=0)
    fresh.load_state_dict(weights)
    assert after[0].response_ids == greedy(fresh, one.prompt.token_ids, 20)
    old = logprobs(model, across[0], 1.0)
    new = logprobs(fresh, across[0], 1.0)
    switch = across[0].weight_versions[0].length
    torch.testing.assert_close(
        torch.tensor(across[0].logprobs), torch.cat([old[:switch], new[switch:]]), atol=2e-3, rtol=0
    )


def test_a_server_that_is_killed_is_started_again_and_the_samples_go_on(worker, loop) -> None:
    async def main() -> list[Rollout]:
        running = asyncio.create_task(worker.generate([group("d", "Tell me a story.")], LONG, worker.version))
        await asyncio.sleep(2.0)
        os.killpg(worker._server._process.pid, signal.SIGKILL)
        return await running

    rollouts = loop.run_until_complete(main())
    assert [r.failure for r in rollouts] == [None] * 4 and all(r.response_ids for r in rollouts)
    assert worker.metrics()["engine/restarts"] == 1.0


def test_aborted_samples_come_back_with_what_they_have(worker, loop) -> None:
    one = group("e", "Tell me a story about the sea.")

    async def main() -> list[Rollout]:
        running = asyncio.create_task(worker.generate([one], LONG, worker.version))
        await asyncio.sleep(1.5)
        await worker.abort([one.group_id])
        return await running

    rollouts = loop.run_until_complete(main())
    assert FinishReason.ABORTED in {r.finish_reason for r in rollouts}


def test_a_version_that_it_does_not_have_is_refused(worker, loop) -> None:
    with pytest.raises(QuintetError, match="version 9 was asked for"):
        loop.run_until_complete(worker.generate([group("f", "Hi")], LONG, 9))

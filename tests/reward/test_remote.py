"""The reward service over HTTP: the same scores as in process, back-pressure, faults on the way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from quintet.cli.serve_reward import _config
from quintet.reward.config import RewardConfig
from quintet.reward.errors import RewardError
from quintet.reward.factory import make_reward_service
from quintet.reward.remote import RemoteRewardService
from quintet.reward.server import RewardServer
from quintet.reward.service import LocalRewardService
from quintet.serving import ThreadedServer
from quintet.types import Failure, FailureKind, FinishReason, Group, GroupId, Prompt, QuintetError, Rollout, Score

KEY = "the-key"
FUNCTIONS = Path(__file__).with_name("reward_functions.py")


def group(texts: list[str], **prompt: Any) -> Group:
    gid = GroupId("p")
    rollouts = [Rollout(gid, i, [1], [2, 3], t, [0.0] * 2, [1] * 2, [], FinishReason.STOP) for i, t in enumerate(texts)]
    return Group(gid, Prompt("p", [1], None, "question", **({"answer": "1/2"} | prompt)), rollouts)


def local(*functions: dict[str, Any], **options: Any) -> LocalRewardService:
    config = {"functions": list(functions), "workers": 0, "max_failure_frac": 1.0} | options
    return LocalRewardService(RewardConfig.model_validate(config))


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", KEY)


def remote(url: str, **options: Any) -> RemoteRewardService:
    return RemoteRewardService(RewardConfig.model_validate({"url": url, "api_key_env": "REWARD_KEY"} | options))


def scored(service: RemoteRewardService, groups: list[Group]) -> list[list[Score]]:
    try:
        return asyncio.run(service.score(groups))
    finally:
        service.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    service = local({"fn": "math"}, {"fn": "length", "weight": 0.5, "args": {"max_tokens": 1}})
    with ThreadedServer(RewardServer(service, key=KEY, max_requests=8, max_samples=64).app()) as running:
        yield running


def test_scores_over_http_are_those_in_process(server: ThreadedServer, key: None) -> None:
    asked = [group([r"\boxed{0.5}", r"\boxed{0.6}"]), group([r"\boxed{3}"], answer="3")]
    asked[1].rollouts[0].finish_reason = FinishReason.ABORTED
    here = local({"fn": "math"}, {"fn": "length", "weight": 0.5, "args": {"max_tokens": 1}})
    try:
        expected = asyncio.run(here.score(asked))
    finally:
        here.close()
    assert scored(remote(server.url), asked) == expected
    assert [s.reward for s in expected[0]] == [0.5, -0.5] and expected[1][0].reward is None


def test_unusable_references_are_found_by_the_server(server: ThreadedServer, key: None) -> None:
    service = remote(server.url)
    prompts = [Prompt("a", [1], answer="1/2"), Prompt("b", [1], answer="{")]
    try:
        [(row, reason)] = service.unusable_references(prompts)
    finally:
        service.close()
    assert row == 1 and "no mathematical answer" in reason


def test_a_plain_request_needs_only_a_text_and_an_answer(server: ThreadedServer) -> None:
    body = {"groups": [{"prompt": {"answer": "5"}, "samples": [{"text": r"\boxed{5}"}]}]}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{server.url}/score", json=body, headers=headers)
    assert answer.json()["scores"][0][0]["reward"] == 1.0
    assert httpx.post(f"{server.url}/score", json=body).status_code == 401
    wrong = httpx.post(f"{server.url}/score", json={"groups": [{"samples": [{"txt": ""}]}]}, headers=headers)
    assert wrong.status_code == 400 and "missing required field `text`" in wrong.text


def test_health_and_metrics_say_what_is_served(server: ThreadedServer, key: None) -> None:
    scored(remote(server.url), [group([r"\boxed{0.5}"])])
    assert httpx.get(f"{server.url}/health").json() == {"ok": True, "functions": ["math", "length"], "samples": 0}
    metrics = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    assert 'quintet_reward_samples_total{outcome="scored"}' in metrics and "quintet_reward_seconds_sum" in metrics


def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.reward.server.MAX_BODY_BYTES", 1000)
    service = RewardServer(local({"fn": "math"}), key=KEY, max_requests=8, max_samples=64)
    with ThreadedServer(service.app()) as server:
        body = {"groups": [{"samples": [{"text": "x" * 2000}]}]}
        answer = httpx.post(f"{server.url}/score", json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 400 and "larger than 1000 bytes" in answer.text


def test_more_samples_than_there_is_room_for_are_told_to_come_again() -> None:
    go, begun = threading.Event(), threading.Event()

    def waits(solution_str: str, ground_truth: str) -> float:
        begun.set()
        go.wait(30.0)
        return 1.0

    service = LocalRewardService(RewardConfig(workers=0, timeout_s=60.0), functions=[waits])
    body = {"groups": [{"samples": [{"text": "a"}, {"text": "b"}]}]}
    headers = {"Authorization": f"Bearer {KEY}"}
    with ThreadedServer(RewardServer(service, key=KEY, max_requests=8, max_samples=3).app()) as server:

        def post() -> httpx.Response:
            return httpx.post(f"{server.url}/score", json=body, headers=headers, timeout=60.0)

        first: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: first.append(post()))
        thread.start()
        assert begun.wait(30.0)
        refused = post()
        go.set()
        thread.join()
        again = post()
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert [first[0].status_code, again.status_code] == [200, 200]


def test_a_server_that_is_not_there_is_a_typed_failure(key: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.reward.http.JsonClient._pause_s", lambda self, attempt: 0.0)
    service = remote("http://127.0.0.1:9", max_failure_frac=1.0)
    [[score]] = scored(service, [group(["a"])])
    assert score.reward is None and isinstance(score.failure, Failure)
    assert score.failure.kind is FailureKind.TRANSPORT and score.failure.retryable
    with pytest.raises(RewardError, match="1 of 1 samples failed"):
        scored(remote("http://127.0.0.1:9", max_failure_frac=0.5), [group(["a"])])


def test_what_the_server_refuses_stops_the_run(server: ThreadedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", "another")
    with pytest.raises(RewardError, match="401"):
        scored(remote(server.url), [group(["a"])])
    monkeypatch.setenv("REWARD_KEY", KEY)
    columns = {"fn": f"{FUNCTIONS}:trl_columns"}
    app = RewardServer(local(columns), key=KEY, max_requests=8, max_samples=64).app()
    with ThreadedServer(app) as other, pytest.raises(RewardError, match="its parameter `level` is no column"):
        scored(remote(other.url), [group(["a"])])


def test_options_that_would_do_nothing_beside_url_are_refused() -> None:
    with pytest.raises(ValidationError, match="with url, timeout_s has no effect here"):
        RewardConfig.model_validate({"url": "http://x", "timeout_s": 1.0})
    with pytest.raises(ValidationError, match="api_key_env goes with url"):
        RewardConfig.model_validate({"api_key_env": "X"})
    resolved = RewardConfig.model_validate({"url": "http://x"}).model_dump()
    assert RewardConfig.model_validate(resolved).url == "http://x"  # as a resumed run reads it


def test_functions_given_in_code_win_over_the_url() -> None:
    def mine(completions: list[str], **_: Any) -> list[float]:
        return [1.0]

    config = RewardConfig.model_validate({"url": "http://x"})
    assert isinstance(make_reward_service(config), RemoteRewardService)
    assert isinstance(make_reward_service(config, functions=[mine]), LocalRewardService)


# ---- the command -----------------------------------------------------------------------------------


def test_the_command_takes_a_recipe_or_functions() -> None:
    config = _config(None, ["math", "length"], ["reward.workers=3"])
    assert ([f.fn for f in config.functions], config.workers, config.max_failure_frac) == (["math", "length"], 3, 1.0)
    with pytest.raises(QuintetError, match="needs a recipe or --fn"):
        _config(None, None, [])
    with pytest.raises(QuintetError, match="--set steps: with --fn only reward"):
        _config(None, ["math"], ["steps=3"])


def test_the_command_serves_and_prints_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "quintet.cli.main", "serve", "reward", "--fn", "exact", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("url: ").strip()
            monkeypatch.setenv("REWARD_KEY", process.stdout.readline().removeprefix("key: ").strip())
            monkeypatch.setattr("quintet.reward.http.JsonClient._pause_s", lambda self, attempt: 0.2)
            [[score]] = scored(remote(url), [group(["7"], answer="7")])
        finally:
            process.terminate()
    assert score.reward == 1.0

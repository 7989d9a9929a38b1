"""The agent loop over the real engine: who said what is masked, limits are outcomes, faults are failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quintet.controller.experience import sample_metrics
from quintet.controller.scoring import score_group
from quintet.models.config import ModelConfig
from quintet.models.tokenizer import PromptEncoder, Tokenizer
from quintet.reward.config import RewardConfig, RewardFunctionConfig
from quintet.reward.sample import sample_of
from quintet.reward.service import LocalRewardService
from quintet.rollout.adapters import GymEnvironment
from quintet.rollout.agent_loop import AgentLoopWorker
from quintet.rollout.config import EnvironmentConfig
from quintet.rollout.environment import Action, EnvironmentFailure, Outcome, Step, TextEnvironment
from quintet.rollout.tool_environment import ToolEnvironment
from quintet.rollout.tools import Tool, calculator
from quintet.types import FailureKind, FinishReason, Group, GroupId, Prompt, Rollout, SamplingParams
from tests.rollout.serving_models import CALL, END, chat_tokenizer, make_worker, random_model, scripted_model
from tests.rollout.test_tools import CASES


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Scripted(TextEnvironment):
    """Says "k" after each action and ends after `turns`; `on_step` may do harm."""

    def __init__(self, turns: int = 2, on_step: Callable[[], object] = lambda: None) -> None:
        super().__init__(-0.5)
        self.turns, self.on_step, self.closed = turns, on_step, 0
        self.actions: list[Action] = []

    async def reset(self, prompt: Prompt, seed: int):
        self.seed = seed
        return None

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        result = self.on_step()
        if asyncio.iscoroutine(result):
            await result
        return Step("kk", done=len(self.actions) == self.turns, reward=1.0)

    async def close(self) -> None:
        self.closed += 1


def loop(model, tokenizer: Tokenizer, make, *, chat: bool = False, **options) -> AgentLoopWorker:
    return AgentLoopWorker(
        make_worker(model, tokenizer),
        make,
        tokenizer=tokenizer,
        encoder=PromptEncoder(tokenizer, ModelConfig(use_chat_template=chat)),
        config=EnvironmentConfig(kind="x", **options),
        context=model.config.max_position_embeddings,
    )


def play(worker: AgentLoopWorker, groups: list[Group], params: SamplingParams) -> list[Rollout]:
    async def program() -> list[Rollout]:
        try:
            return await worker.generate(groups, params, 0)
        finally:
            await worker.close()

    return asyncio.run(program())


def plain(tokenizer: Tokenizer, text: str = "q", name: str = "p") -> Group:
    return Group(GroupId(name), Prompt(name, tokenizer.encode(text), text=text, answer="a"))


def test_tool_tokens_are_masked_and_every_turn_of_the_policy_is_trained() -> None:
    case = CASES["MTU01"]
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"q": "m", "m": "n", "k": "w"})  # "mn", its end; the tool's "kk"; "w"
    (rollout,) = play(loop(model, tokenizer, Scripted), [plain(tokenizer)], SamplingParams(max_tokens=30))
    assert tokenizer.decode_all(rollout.response_ids) == f"mn{END}kkw{END}"
    assert rollout.loss_mask == [1, 1, 1, 0, 0, 1, 1]
    without_end_ids = [
        m for i, m in zip(rollout.response_ids, rollout.loss_mask, strict=True) if i != tokenizer.eos_ids[0]
    ]
    assert without_end_ids == case["expect"]["loss_mask_response"]
    assert rollout.turns == CASES["MTU07"]["expect"]["trained_turns"]
    assert [p for p, m in zip(rollout.logprobs, rollout.loss_mask, strict=True) if not m] == [0.0, 0.0]
    assert sum(run.length for run in rollout.weight_versions) == 7
    assert (rollout.text, rollout.finish_reason) == ("w", FinishReason.STOP)
    assert sample_of(Group(GroupId("p"), Prompt("p", []), [rollout]), 0).length == 5  # a length penalty counts its own
    assert rollout.episode is not None
    assert (rollout.episode.outcome, rollout.episode.reward) == (Outcome.DONE, 2.0)


def test_a_chat_model_calls_a_json_tool_and_reads_the_reply_through_its_template() -> None:
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"\n": CALL})
    group = Group(GroupId("p"), Prompt("p", [1], messages=[{"role": "user", "content": "1+2?"}]))
    worker = loop(model, tokenizer, lambda: ToolEnvironment([Tool.of(add)]), chat=True, max_turns=2)
    (rollout,) = play(worker, [group], SamplingParams(max_tokens=200))
    whole = tokenizer.decode_all([*rollout.prompt_ids, *rollout.response_ids])
    reply = f"{END}\n<|im_start|>tool\n3{END}\n<|im_start|>assistant\n"
    assert whole.startswith("<|im_start|>system\n[{") and f"{CALL}{reply}{CALL}{END}" in whole
    own = [i for i, m in zip(rollout.response_ids, rollout.loss_mask, strict=True) if m]
    assert tokenizer.decode_all(own) == f"{CALL}{END}" * 2
    assert rollout.episode is not None
    assert (rollout.episode.outcome, rollout.episode.tool_calls) == (Outcome.MAX_TURNS, 2)


def test_running_out_of_turns_or_context_is_an_outcome_scored_by_the_environment() -> None:
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"q": "m", "k": "w"})
    (turns,) = play(
        loop(model, tokenizer, lambda: Scripted(9), max_turns=3), [plain(tokenizer)], SamplingParams(max_tokens=90)
    )
    assert turns.episode is not None and turns.failure is None
    assert (turns.episode.outcome, turns.turns, turns.episode.reward) == (Outcome.MAX_TURNS, 3, 3.0 - 0.5)
    assert turns.finish_reason is FinishReason.LENGTH
    (budget,) = play(loop(model, tokenizer, lambda: Scripted(9)), [plain(tokenizer)], SamplingParams(max_tokens=9))
    assert budget.episode is not None
    assert budget.episode.outcome == Outcome.CONTEXT
    assert len(budget.response_ids) <= 9
    small = scripted_model(tokenizer, {"q": "m", "k": "w"}, context=10)
    (context,) = play(loop(small, tokenizer, lambda: Scripted(9)), [plain(tokenizer)], SamplingParams(max_tokens=500))
    assert context.episode is not None and context.failure is None
    assert context.episode.outcome == Outcome.CONTEXT
    assert context.loss_mask[-1] == 1  # nothing after the last sampled token


def test_one_environment_of_a_group_that_raises_leaves_the_other_three_and_is_counted_by_kind() -> None:
    case = CASES["MTU04"]
    tokenizer = chat_tokenizer()
    made: list[Scripted] = []

    def explode() -> None:
        raise ConnectionError("host is gone")

    def make() -> Scripted:
        made.append(Scripted(2, explode if len(made) == 1 else lambda: None))
        return made[-1]

    group = plain(tokenizer)
    worker = loop(scripted_model(tokenizer, {"q": "m", "k": "w"}), tokenizer, make)
    group.rollouts = play(worker, [group], SamplingParams(n=case["input"]["group"], max_tokens=30))
    service = LocalRewardService(RewardConfig(functions=[RewardFunctionConfig(fn="environment")], workers=0))
    group.scores = asyncio.run(score_group(service, group))
    service.close()
    failures = [r.failure for r in group.rollouts if r.failure is not None]
    assert [(f.kind, f.retryable) for f in failures] == [(FailureKind.ENVIRONMENT, True)]
    assert "ConnectionError: host is gone" in failures[0].message
    assert sorted(s.reward for s in group.scores if s.reward is not None) == [2.0] * 3
    metrics = sample_metrics([group], 0)
    assert metrics["failures/environment"] == 1.0
    assert metrics["environment/done_frac"] == 1.0
    assert metrics["environment/turns_mean"] == 2.0
    assert [environment.closed for environment in made] == [1, 1, 1, 1]


def test_a_slow_environment_is_a_time_out_and_its_own_failures_keep_their_kind() -> None:
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"q": "m"})

    def raise_(error: Exception) -> None:
        raise error

    for on_step, kind in (
        (lambda: asyncio.sleep(60), FailureKind.TIMEOUT),
        (lambda: raise_(EnvironmentFailure("no worker", kind=FailureKind.SANDBOX)), FailureKind.SANDBOX),
    ):
        worker = loop(model, tokenizer, lambda on_step=on_step: Scripted(2, on_step), timeout_s=0.1)
        (rollout,) = play(worker, [plain(tokenizer)], SamplingParams(max_tokens=30))
        assert rollout.failure is not None and rollout.failure.kind is kind
        assert rollout.finish_reason is FinishReason.FAILED


def test_an_episode_alone_equals_the_same_one_among_many() -> None:
    tokenizer = chat_tokenizer()
    model = random_model(tokenizer)
    groups = [plain(tokenizer, f"q{i}", f"p{i}") for i in range(12)]
    params = SamplingParams(n=2, max_tokens=20, seed=3)

    def ids(groups: list[Group]) -> list[list[int]]:
        return [
            r.response_ids for r in play(loop(model, tokenizer, lambda: Scripted(3), turn_tokens=4), groups, params)
        ]

    many = ids(groups)
    assert many[10:12] == ids([groups[5]])
    assert many[10] != many[11]
    first, second = many[10][:4], many[10][6:10]
    assert first != second  # a later turn does not repeat the draws of the first


def test_samples_of_a_group_share_the_environments_seed_and_other_groups_have_another() -> None:
    tokenizer = chat_tokenizer()
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted(1))
        return made[-1]

    groups = [plain(tokenizer, "q", "a"), plain(tokenizer, "q", "b")]
    play(loop(scripted_model(tokenizer, {"q": "m"}), tokenizer, make), groups, SamplingParams(n=2, max_tokens=4))
    seeds = sorted(e.seed for e in made)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_abort_ends_episodes_with_what_they_have() -> None:
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"q": "m", "m": "m"})
    waits = asyncio.Event

    async def program() -> list[Rollout]:
        gate = waits()
        stuck = Scripted(5, lambda: gate.wait())
        worker = loop(model, tokenizer, lambda: stuck, turn_tokens=3)
        group = plain(tokenizer)
        work = asyncio.ensure_future(worker.generate([group], SamplingParams(max_tokens=90), 0))
        while not stuck.actions:
            await asyncio.sleep(0.005)
        await worker.abort([group.group_id])
        gate.set()
        try:
            return await work
        finally:
            await worker.close()

    (rollout,) = asyncio.run(program())
    assert (rollout.finish_reason, len(rollout.response_ids)) == (FinishReason.ABORTED, 3)


class Guess:
    """Gymnasium's API: guess the letter, three tries."""

    def reset(self, *, seed=None, options=None):
        self.tries, self.letter = 0, options["letter"]
        return "guess", {}

    def step(self, action: str):
        self.tries += 1
        right = action == self.letter
        return "no", float(right), right, self.tries == 3, {}

    def close(self) -> None: ...


def test_a_gymnasium_text_environment_plays_and_gives_its_reward() -> None:
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"\n": "x"})

    def episode(letter: str) -> Rollout:
        group = plain(tokenizer)
        group.prompt.metadata = {"letter": letter}
        worker = loop(model, tokenizer, lambda: GymEnvironment(Guess), chat=True)
        return play(worker, [group], SamplingParams(max_tokens=200))[0]

    right, wrong = episode("x"), episode("y")
    assert (right.turns, right.episode and right.episode.reward) == (1, 1.0)
    assert (wrong.turns, wrong.episode and wrong.episode.reward) == (3, 0.0)
    user = f"<|im_start|>user\nno{END}\n"
    assert tokenizer.decode_all(wrong.response_ids).count(user) == 2


def test_the_calculator_in_tags_through_the_engine() -> None:
    tokenizer = chat_tokenizer(extra=["<c>2*3</c>"])
    model = scripted_model(tokenizer, {"q": "<c>2*3</c>", "]": "6", "6": "6"})
    worker = loop(model, tokenizer, lambda: ToolEnvironment([Tool.of(calculator, "c")], format="tags"), turn_tokens=2)
    (rollout,) = play(worker, [plain(tokenizer)], SamplingParams(max_tokens=60))
    assert tokenizer.decode_all(rollout.response_ids) == "<c>2*3</c>[6]66"
    assert rollout.loss_mask == [1, 0, 0, 0, 1, 1]
    assert rollout.episode is not None
    assert (rollout.episode.outcome, rollout.episode.tool_calls) == (Outcome.CONTEXT, 1)  # its second turn was cut

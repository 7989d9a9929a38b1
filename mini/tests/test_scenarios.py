import heapq

import pytest

from rl_post_training_mini import demo
from rl_post_training_mini.stage import ScenarioFailed, Stage

STEP_S = 0.01


class RecordingStage(Stage):
    """Notes whether each claim holds, and goes on."""

    def __init__(self) -> None:
        super().__init__(write=lambda line: None)
        self.claims: dict[str, bool] = {}

    def verify(self, holds: bool, key: str, **figures: object) -> None:
        self.claims[key] = holds


def test_scenario_1_simple_grpo(stage):
    figures = demo.scenario_1(stage)
    assert figures["after"] > figures["before"]
    assert figures["kl"] > 0.0
    assert figures["clip_frac"] > 0.0


def test_scenario_2_multi_step(stage):
    figures = demo.scenario_2(stage)
    assert figures["reward_1"] + 0.1 < figures["reward_5"] < figures["reward_10"] - 0.1
    assert figures["kl_10"] < 1.0


def test_scenario_3_weight_sync(stage):
    assert demo.scenario_3(stage) == {"rollout_version": 3, "version": 4, "stale": 64}


def test_scenario_4_kl_penalty(stage):
    figures = demo.scenario_4(stage)
    assert figures["kl_free"] >= 3.0 * figures["kl_held"]
    assert figures["start"] < figures["reward_held"] < figures["reward_free"]


def test_scenario_5_long_tail(stage):
    """Both times by hand from the 32 lengths: batches of 8 in order, and each length to the slot free first."""
    figures = demo.scenario_5(stage)
    lengths = [int(figures[f"length_{i}"]) for i in range(32)]
    static_steps = sum(max(lengths[i : i + 8]) for i in (0, 8, 16, 24))
    free_at = [0] * 8
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    assert figures["static_s"] == pytest.approx(static_steps * STEP_S)
    assert figures["continuous_s"] == pytest.approx(max(free_at) * STEP_S)
    assert figures["less_time"] == pytest.approx(1.0 - max(free_at) / static_steps)
    assert figures["more_throughput"] == pytest.approx(static_steps / max(free_at) - 1.0)


def test_scenario_6_reward_hacking(stage):
    figures = demo.scenario_6(stage)
    assert figures["model_hacked"] > 0.8
    assert figures["rule_hacked"] < 0.05 < figures["rule_start_hacked"]
    assert figures["rule_mixed"] > 0.8


def test_scenario_7_paged_kv_cache(stage):
    figures = demo.scenario_7(stage)
    assert (figures["shared"], figures["unshared"]) == (18, 32)
    assert figures["paged"] < figures["contiguous"]
    assert figures["preemptions"] > 0


def test_scenario_8_async_rollout(stage):
    figures = demo.scenario_8(stage)
    assert figures["reward_async"] > max(figures["reward_sync"], figures["reward_uncorrected"])
    assert figures["rate_async"] > max(figures["rate_sync"], figures["rate_uncorrected"])
    assert figures["staleness_sync"] == 0.0 < figures["staleness_async"] <= 4.0


def test_scenario_9_reward_model(stage):
    figures = demo.scenario_9(stage)
    assert figures["accuracy"] > 0.75
    assert figures["rule"] > figures["rule_start"] + 0.2


def test_scenario_10_agent(stage):
    figures = demo.scenario_10(stage)
    assert figures["before"] < 0.3
    assert figures["after"] > 0.7


def test_scenario_2_holds_for_random_seeds_0_to_9(stage):
    figures = [demo.scenario_2(stage, seed) for seed in range(10)]
    assert sum(f["reward_1"] < f["reward_5"] < f["reward_10"] for f in figures) >= 9
    assert all(f["reward_10"] > f["reward_1"] for f in figures)


def test_scenario_4_holds_for_random_seeds_0_to_4(stage):
    for seed in range(5):
        figures = demo.scenario_4(stage, seed)
        assert figures["kl_free"] >= 3.0 * figures["kl_held"]
        assert figures["reward_held"] > figures["start"]


@pytest.mark.parametrize(
    ("scenario", "learnt"),
    [
        (demo.scenario_1, {"1.learnt", "1.clipped"}),
        (demo.scenario_2, {"2.rises"}),
        (demo.scenario_4, {"4.runaway", "4.cost"}),
        (demo.scenario_6, {"6.detected", "6.cured"}),
        (demo.scenario_8, {"8.faster", "8.corrected"}),
        (demo.scenario_9, {"9.generalises", "9.transfers"}),
        (demo.scenario_10, {"10.learnt"}),
    ],
)
def test_with_learning_rate_zero_every_claim_of_learning_fails(scenario, learnt):
    stage = RecordingStage()
    scenario(stage, learning_rate=0.0)
    assert {key for key, holds in stage.claims.items() if not holds} == learnt


def test_a_claim_that_does_not_hold_prints_no_check_mark():
    lines: list[str] = []
    stage = Stage("en", lines.append)
    with pytest.raises(ScenarioFailed, match="rises monotonically"):
        demo.scenario_2(stage, learning_rate=0.0)
    assert lines
    assert not any("✓" in line for line in lines)

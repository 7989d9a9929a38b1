import json
from string import Formatter

import pytest

from rl_post_training_mini import demo
from rl_post_training_mini.stage import ScenarioFailed, Stage
from rl_post_training_mini.texts import TEXTS, TITLES


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


@pytest.mark.parametrize("key", TEXTS)
def test_both_languages_say_the_same_figures(key: str):
    zh, en = TEXTS[key]
    assert fields(zh) == fields(en)
    assert en.isascii() or not any("\u4e00" <= c <= "\u9fff" for c in en)


def test_one_scenario_alone_in_either_language(capsys):
    assert demo.main(["--scenario", "5"]) == 0
    chinese = capsys.readouterr().out
    assert demo.main(["--scenario", "5", "--lang", "en"]) == 0
    english = capsys.readouterr().out
    assert "场景 5:长尾生成与负载均衡" in chinese
    assert chinese.rstrip().endswith("✅ 场景 5 通过")
    assert "Scenario 5: long-tailed generation" in english
    assert not any("\u4e00" <= c <= "\u9fff" for c in english)


def test_all_ten_are_played_in_order(monkeypatch, capsys):
    """With stand-ins: the scenarios themselves are run in test_scenarios.py."""
    played: list[int] = []

    def stand_in(number: int) -> demo.Scenario:
        def scenario(stage: Stage, seed: int) -> dict[str, float]:
            played.append(number)
            return {"seed": seed}

        return scenario

    assert [s.__name__ for s in demo.SCENARIOS] == [f"scenario_{n}" for n in range(1, 11)]
    monkeypatch.setattr(demo, "SCENARIOS", [stand_in(n) for n in range(1, 11)])
    assert demo.main([]) == 0
    out = capsys.readouterr().out
    assert played == list(range(1, 11))
    assert all(f"场景 {n}:{TITLES[n - 1][0]}" in out for n in range(1, 11))
    assert out.index("场景 6") < out.index("✅ 全部 6 个场景通过") < out.index("场景 7")
    assert out.rstrip().endswith("✅ 全部 4 个扩展场景通过")


def test_the_trace_is_chrome_trace_json_with_three_lanes(tmp_path):
    path = tmp_path / "out.json"
    assert demo.main(["--scenario", "8", "--trace", str(path)]) == 0
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[e["pid"], e["tid"]] for e in spans} == {"rollout", "reward", "train"}
    assert all(isinstance(e[k], int) and e[k] >= 0 for e in spans for k in ("ts", "dur", "pid", "tid"))
    assert all(names[e["pid"], e["tid"]] == e["cat"] for e in spans)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in spans:
        lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for lane in lanes.values():  # within a lane nothing overlaps
        lane.sort()
        assert all(a[1] <= b[0] for a, b in zip(lane, lane[1:], strict=False))


def test_a_failure_is_told_and_exits_with_1(monkeypatch, capsys):
    def fails(stage: Stage, seed: int) -> dict[str, float]:
        stage.verify(False, "1.clipped")
        return {}

    monkeypatch.setattr(demo, "SCENARIOS", [fails, *demo.SCENARIOS[1:]])
    assert demo.main([]) == 1
    out = capsys.readouterr().out
    assert "✗ 不成立" in out
    assert "✓" not in out
    assert "✅" not in out


@pytest.mark.parametrize("argv", [["--scenario", "11"], ["--lang", "fr"], ["--unknown"]])
def test_wrong_arguments_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(argv)
    assert stopped.value.code == 2
    with pytest.raises(ValueError, match="lang"):
        Stage("fr")
    assert issubclass(ScenarioFailed, AssertionError)

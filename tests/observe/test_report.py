from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quintet.config import RunConfig, save
from quintet.observe.charts import Series, buckets, fit, line_chart, number, smooth, stacked_chart, ticks
from quintet.observe.metrics import JsonlSink
from quintet.observe.report import write_comparison, write_report
from quintet.observe.samples import best_and_worst, most_surprising, read_samples
from quintet.observe.summary import write_summary
from quintet.types import QuintetError

VOID = {"meta", "br", "line", "polyline", "polygon", "circle"}


class Page(HTMLParser):
    """Checks that tags nest, and collects text and tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def a_run(folder: Path, steps: int) -> Page:
    """A run folder as a training leaves it, and the report on it."""
    sink = JsonlSink(folder / "metrics.jsonl")
    for n in range(1, steps + 1):
        values = {
            "reward/mean": n / steps,
            "kl/ref": 0.01,
            "actor/entropy": 1.0,
            "time/step_s": 2.0,
            "time/forward_s": 0.5,
            "time/decode_s": 0.75,
            "buffer/staleness_max": 0.0,
        }
        sink.log(n, values | {"mismatch/max_abs_logprob": 1e-6, "rollout/tokens_per_s": 1000.0})
    sink.log(steps, {"eval/accuracy": 0.75, "eval_sampled/pass_at_8": 0.875})
    sink.close()
    save(RunConfig(name="a <run>"), folder / "config.yaml")
    evals = {"eval/n": 100, "eval/accuracy_before": 0.4, "eval/accuracy_after": 0.75}
    write_summary(folder, {"seed": 5, "steps": steps, "seconds": 61.0, "peak_rss_bytes": 10**9, **evals})
    return Page(write_report(folder).read_text(encoding="utf-8"))


def figures(page: Page) -> list[dict[str, str | None]]:
    return [attrs for tag, attrs in page.tags if tag == "figure"]


@pytest.mark.parametrize("steps", [1, 2, 50, 2000])
def test_a_report_of_any_length_shows_curves_and_results(tmp_path: Path, steps: int) -> None:
    page = a_run(tmp_path, steps)
    assert "40.0% → 75.0%" in page.text and "+35.0" in page.text and "1:01" in page.text and "seed 5" in page.text
    titles = [
        "Held-out accuracy",
        "Reward",
        "KL",
        "Entropy",
        "Engine / trainer mismatch",
        "Throughput",
        "Step time",
        "Where a step's time goes",
    ]
    assert all(title in page.text for title in titles)
    assert len(figures(page)) == len(titles)  # a metric that was never logged has no chart
    assert (tmp_path / "report.html").stat().st_size < 400_000


def test_the_curve_goes_through_the_logged_values(tmp_path: Path) -> None:
    page = a_run(tmp_path, 4)
    reward = next(f for f in figures(page) if '"mean"' in str(f["data-series"]))
    assert json.loads(str(reward["data-series"])) == [
        {"name": "mean", "points": [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]]}
    ]
    split = figures(page)[-1]
    assert json.loads(str(split["data-series"])) == [
        {"name": "decode", "points": [[n, 0.75] for n in (1, 2, 3, 4)]},
        {"name": "forward", "points": [[n, 0.5] for n in (1, 2, 3, 4)]},
        {"name": "other", "points": [[n, 0.75] for n in (1, 2, 3, 4)]},
    ]
    assert "decode 38%" in page.text and "forward 25%" in page.text


def test_pass_at_n_is_drawn_for_the_n_that_was_measured(tmp_path: Path) -> None:
    assert json.loads(str(figures(a_run(tmp_path, 2))[0]["data-series"])) == [
        {"name": "greedy", "points": [[2, 0.75]]},
        {"name": "pass@8", "points": [[2, 0.875]]},
    ]


def test_a_run_that_has_written_nothing_yet_has_a_report_too(tmp_path: Path) -> None:
    save(RunConfig(name="young"), tmp_path / "config.yaml")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "No training step has been recorded" in page.text and "No rollouts were kept" in page.text
    with pytest.raises(QuintetError, match="no run folder"):
        write_report(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("notes.txt", "mine", "holds no run"),
        ("summary.json", '{"steps": ', "summary.json cannot be read"),
        ("summary.json", "[1]", "holds no summary"),
        ("metrics.jsonl", '{"step": 1}\n{"st\n', "metrics.jsonl:2 is damaged"),
        ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl:1 is no line of this file"),
        ("config.yaml", "steps: [1", "config.yaml is damaged"),
        ("config.yaml", "- 1", "config.yaml is no recipe"),
    ],
)
def test_what_is_no_run_or_is_damaged_is_said_in_one_sentence(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    if name != "notes.txt":
        (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / name).write_text(content)
    with pytest.raises(QuintetError, match=said) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_a_run_of_no_steps_says_that_it_is_not_finished(tmp_path: Path) -> None:
    save(RunConfig(name="young", steps=30), tmp_path / "config.yaml")
    assert "not finished: 0 of 30 steps" in Page(write_report(tmp_path).read_text(encoding="utf-8")).text


def test_what_was_0_throughout_is_a_line_and_not_a_chart(tmp_path: Path) -> None:
    page = a_run(tmp_path, 5)
    assert "0 in every step: Staleness." in page.text
    assert len(figures(page)) == 8  # no other chart is missing


def test_reward_parts_have_a_chart_unless_they_are_the_reward(tmp_path: Path) -> None:
    def titles(name: str, **parts: float) -> list[str]:
        (tmp_path / name).mkdir()
        sink = JsonlSink(tmp_path / name / "metrics.jsonl")
        sink.log(1, {"reward/mean": 0.5} | {f"reward/{part}/mean": value for part, value in parts.items()})
        sink.close()
        page = Page(write_report(tmp_path / name).read_text(encoding="utf-8"))
        return [str(f["data-series"]) for f in figures(page)]

    assert len(titles("one", number=0.5)) == 1
    two = titles("two", number=0.25, style=0.25)
    assert len(two) == 2 and json.loads(two[1]) == [
        {"name": "number", "points": [[1, 0.25]]},
        {"name": "style", "points": [[1, 0.25]]},
    ]


def test_findings_stand_above_the_curves_and_failures_have_a_table(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for n in range(1, 11):
        sink.log(n, {"reward/mean": 0.5, "rollout/truncated_frac": 0.5, "failures/timeout": 2.0, "dropped/stale": 1.0})
    sink.close()
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert text.index("50% of the responses were cut off") < text.index("Curves") < text.index("failures/timeout20")
    assert "dropped/stale10" in text


def test_several_runs_share_each_chart_and_their_differences_are_named(tmp_path: Path) -> None:
    for name, steps in (("a", 3), ("b", 5)):
        (tmp_path / name).mkdir()
        a_run(tmp_path / name, steps)
        save(RunConfig(name=name, steps=steps), tmp_path / name / "config.yaml")
    page = Page(write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text(encoding="utf-8"))
    reward = json.loads(str(figures(page)[1]["data-series"]))
    assert [(s["name"], len(s["points"])) for s in reward] == [("a", 3), ("b", 5)]
    accuracy = json.loads(str(figures(page)[0]["data-series"]))
    assert [s["name"] for s in accuracy] == ["a greedy", "a pass@8", "b greedy", "b pass@8"]
    assert page.text.count("Where a step's time goes: ") == 2
    differing = page.text[page.text.index("What differs") : page.text.index("Failures")]
    assert "steps35" in differing and "model.name" not in differing


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [tmp_path / side / "run" for side in ("left", "right")]
    for folder in folders:
        folder.mkdir(parents=True)
        a_run(folder, 1)
    text = Page(write_comparison(folders, tmp_path / "c.html").read_text(encoding="utf-8")).text
    assert "left/run" in text and "right/run" in text
    with pytest.raises(QuintetError, match="given twice"):
        write_comparison([folders[0], folders[0]], tmp_path / "c.html")
    with pytest.raises(QuintetError, match="at most 8"):
        write_comparison([folders[0]] * 9, tmp_path / "c.html")


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    a_run(tmp_path, 3)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|\bsrc=|<link|url\(", html)


def test_names_and_samples_are_escaped(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [{"step": 1, "prompt": "<b>", "text": "</pre><script>x", "reward": 1.0, "parts": {}}])
    a_run(tmp_path, 1)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a &lt;run&gt;" in html and "&lt;/pre&gt;&lt;script&gt;x" in html and "<script>x" not in html


def write_samples(folder: Path, step: int, rows: list[dict[str, object]]) -> None:
    (folder / "rollouts").mkdir(exist_ok=True)
    with (folder / "rollouts" / f"step-{step:06d}.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def sample(step: int, reward: float | None, text: str = "t", **more: object) -> dict[str, object]:
    return {
        "step": step,
        "prompt": "求 1+1 的值",
        "text": text,
        "reward": reward,
        "parts": {"exact": reward, "style": None},
    } | more


def test_best_and_worst_of_last_and_first_step_are_shown(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample(1, 0.0, "early bad"), sample(1, 1.0, "early good")])
    write_samples(tmp_path, 2, [sample(2, 1.0, "middle")])
    late = [sample(3, 0.5, "late good"), sample(3, None, "unscored"), sample(3, 0.25, "late bad")]
    write_samples(tmp_path, 3, late)
    page = a_run(tmp_path, 3)
    order = [page.text.index(t) for t in ("late good", "late bad", "early good", "early bad")]
    assert order == sorted(order)
    assert "middle" not in page.text
    assert "style abstained" in page.text and "求 1+1 的值" in page.text


def test_what_was_not_scored_is_shown_with_its_reason_and_not_as_0(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample(1, None, "hung", failure="timeout: 5 s", answer="17"), sample(1, 0.0, "wrong")])
    text = a_run(tmp_path, 1).text
    assert text.index("wrong") < text.index("Not scored of the latest step (1)") < text.index("hung")
    assert "timeout: 5 s" in text and "→ 17" in text


def test_tokens_are_tinted_by_their_surprise(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample(1, 1.0, "a", tokens=["a", ""], logprobs=[-0.6931471805599453, -100.0])])
    page = a_run(tmp_path, 1)
    tokens = [attrs for tag, attrs in page.tags if tag == "span" and attrs.get("class") == "t"]
    assert [t["title"] for t in tokens[:2]] == ["p = 0.5", "p = 3.72e-44"]
    assert [t["style"] for t in tokens[:2]] == ["--s:0.13", "--s:0.75"]
    assert "a·" in page.text


def test_no_sample_is_both_best_and_worst() -> None:
    rows = [sample(1, r, str(r)) for r in (3, None, 1, 2)]
    best, worst = best_and_worst(rows, 4)
    assert ([r["reward"] for r in best], [r["reward"] for r in worst]) == ([3, 2], [1])
    assert best_and_worst(rows[:1], 4) == (rows[:1], [])
    assert best_and_worst([], 4) == ([], [])


def test_equal_answers_to_a_prompt_are_shown_once() -> None:
    rows = [sample(1, 1.0, "same"), sample(1, 1.0, "same"), sample(1, 1.0, "other")]
    assert [r["text"] for r in best_and_worst(rows, 4)[0]] == ["same"]
    assert [r["text"] for r in best_and_worst(rows, 4)[1]] == ["other"]


def test_the_most_surprising_has_the_lowest_mean_log_probability(tmp_path: Path) -> None:
    rows = [sample(1, 1.0, "long", logprobs=[-1.0] * 20), sample(1, 0.0, "odd", logprobs=[-4.0, -2.0]), sample(1, 0.0)]
    assert [r["text"] for r in most_surprising(rows, 2)] == ["odd", "long"]
    write_samples(tmp_path, 1, [row | {"tokens": ["x"] * len(row.get("logprobs", []))} for row in rows])  # type: ignore[arg-type]
    text = a_run(tmp_path, 1).text
    assert text.index("Most surprising: lowest mean log-probability (step 1)") < text.rindex("-3.00 nats/token")


def test_one_step_is_not_shown_twice(tmp_path: Path) -> None:
    write_samples(tmp_path, 4, [sample(4, 1.0), sample(4, 0.0)])
    samples = read_samples(tmp_path / "rollouts")
    assert len(samples.first) == 2 and samples.last == []


def test_samples_of_a_long_run_are_read_from_its_ends(tmp_path: Path) -> None:
    for n in range(1, 121):
        write_samples(tmp_path, n, [sample(n, 1.0)])
    samples = read_samples(tmp_path / "rollouts")
    assert samples.first[0]["step"] == 1 and samples.last[0]["step"] == 120
    assert [r["step"] for r in samples.recent] == list(range(71, 121))


# -- the drawing -------------------------------------------------------------------------------------


def test_buckets_keep_the_extremes_of_long_runs() -> None:
    points = [(i, 0.0) for i in range(1, 2001)]
    points[1234] = (1235, 9.0)
    cells = buckets(points, limit=200)
    assert len(cells) == 200 and cells[0].step == 10 and cells[-1].step == 2000
    assert max(c.high for c in cells) == 9.0 and max(c.mean for c in cells) == pytest.approx(0.9)
    assert [c.mean for c in buckets([(1, 2.0), (2, 4.0)])] == [2.0, 4.0]


def test_smoothing_leaves_a_straight_line_and_short_series_alone() -> None:
    line = [float(i) for i in range(400)]
    assert smooth(line) == pytest.approx(line)
    assert smooth([1.0, 5.0]) == [1.0, 5.0]
    noisy = [float(i % 2) for i in range(400)]
    assert all(abs(v - 0.5) < 0.03 for v in smooth(noisy)[20:-20])


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert ticks(3.0, 97.0) == pytest.approx([25.0, 50.0, 75.0])
    assert ticks(2.0, 2.0) == [2.0]
    assert [number(v) for v in (0, 0.25, 1234.0, 2e-6, 1.5e7)] == ["0", "0.25", "1,234", "2e-6", "1.5e7"]


def test_a_constant_series_and_a_single_point_have_a_frame() -> None:
    frame = fit([Series("s", [(5, 0.0)])], floor=0.0)
    assert frame.y0 == 0.0 and frame.y1 > 0.0
    assert "NaN" not in line_chart("t", "n", [Series("s", [(5, -3.0)])])
    assert stacked_chart("t", "n", [Series("a", [(5, 0.0)]), Series("b", [(5, 0.0)])]).count("<polygon") == 2

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quintet.config import RunConfig, save
from quintet.observe.charts import Series, buckets, fit, line_chart, number, smooth, stacked_chart, ticks
from quintet.observe.metrics import JsonlSink
from quintet.observe.report import write_report
from quintet.observe.samples import best_and_worst, first_and_last_step
from quintet.observe.summary import write_summary

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
            "time/update_s": 0.5,
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
        {"name": "update", "points": [[n, 0.5] for n in (1, 2, 3, 4)]},
        {"name": "other", "points": [[n, 1.5] for n in (1, 2, 3, 4)]},
    ]


def test_pass_at_n_is_drawn_for_the_n_that_was_measured(tmp_path: Path) -> None:
    assert json.loads(str(figures(a_run(tmp_path, 2))[0]["data-series"])) == [
        {"name": "greedy", "points": [[2, 0.75]]},
        {"name": "pass@8", "points": [[2, 0.875]]},
    ]


def test_an_empty_folder_has_a_report_too(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "No training step has been recorded" in page.text and "No rollouts were kept" in page.text
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "absent")


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    a_run(tmp_path, 3)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|\bsrc=|<link|url\(", html)


def test_names_and_samples_are_escaped(tmp_path: Path) -> None:
    write_samples(tmp_path, [{"step": 1, "prompt": "<b>", "text": "</pre><script>x", "reward": 1.0, "parts": {}}])
    a_run(tmp_path, 1)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a &lt;run&gt;" in html and "&lt;/pre&gt;&lt;script&gt;x" in html and "<script>x" not in html


def write_samples(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "rollouts").mkdir(exist_ok=True)
    with (folder / "rollouts" / "samples.jsonl").open("a", encoding="utf-8") as file:
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
    write_samples(tmp_path, [sample(1, 0.0, "early bad"), sample(1, 1.0, "early good"), sample(2, 1.0, "middle")])
    write_samples(tmp_path, [sample(3, 0.5, "late good"), sample(3, None, "unscored"), sample(3, 0.25, "late bad")])
    page = a_run(tmp_path, 3)
    order = [page.text.index(t) for t in ("late good", "late bad", "early good", "early bad")]
    assert order == sorted(order)
    assert "middle" not in page.text
    assert "style abstained" in page.text and "求 1+1 的值" in page.text


def test_what_was_not_scored_is_shown_with_its_reason_and_not_as_0(tmp_path: Path) -> None:
    write_samples(tmp_path, [sample(1, None, "hung", failure="timeout: 5 s", answer="17"), sample(1, 0.0, "wrong")])
    text = a_run(tmp_path, 1).text
    assert text.index("wrong") < text.index("Not scored of the latest step (1)") < text.index("hung")
    assert "timeout: 5 s" in text and "→ 17" in text


def test_tokens_are_tinted_by_their_surprise(tmp_path: Path) -> None:
    write_samples(tmp_path, [sample(1, 1.0, "a", tokens=["a", ""], logprobs=[-0.6931471805599453, -100.0])])
    page = a_run(tmp_path, 1)
    tokens = [attrs for tag, attrs in page.tags if tag == "span" and attrs.get("class") == "t"]
    assert [t["title"] for t in tokens] == ["p = 0.5", "p = 3.72e-44"]
    assert [t["style"] for t in tokens] == ["--s:0.13", "--s:0.75"]
    assert "a·" in page.text


def test_no_sample_is_both_best_and_worst() -> None:
    rows = [{"reward": r} for r in (3, None, 1, 2)]
    best, worst = best_and_worst(rows, 4)
    assert ([r["reward"] for r in best], [r["reward"] for r in worst]) == ([3, 2], [1])
    assert best_and_worst([{"reward": 1}], 4) == ([{"reward": 1}], [])
    assert best_and_worst([], 4) == ([], [])


def test_one_step_is_not_shown_twice(tmp_path: Path) -> None:
    write_samples(tmp_path, [sample(4, 1.0), sample(4, 0.0)])
    first, last = first_and_last_step(tmp_path / "rollouts")
    assert len(first) == 2 and last == []


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

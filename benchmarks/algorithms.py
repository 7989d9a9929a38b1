"""Every preset on one task from one start: preset x held-out accuracy x seconds.

    python benchmarks/algorithms.py                              # everything; hours on two cores
    python benchmarks/algorithms.py --presets grpo,ppo --steps 40 --seeds 1
    python benchmarks/algorithms.py --page docs/which_algorithm.md

A tiny model is warm-started once (supervised, recipes/sums_tiny.yaml); each preset then trains from those weights on
the same questions, with the same number of samples a step and the same learning rate, and is asked 200 questions that
neither stage has seen (greedy). Offline presets get pairs made of the same questions. Seeds change sampling and order,
not the start and not the split. Runs are kept in --out: what is finished there is not run again.

Left out: a learning rate tuned for each preset. A preset that would win with another one loses here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import quintet
from quintet.algorithms.docs import preset_table
from quintet.algorithms.presets import OFFLINE_PRESETS, PRESETS
from quintet.config import load_config
from quintet.data.dataset import load_rows
from quintet.data.tasks import task_rows
from quintet.observe.metrics import read_metrics
from quintet.types import QuintetError

RECIPE = Path(__file__).parents[1] / "recipes" / "sums_tiny.yaml"
HEADLINE = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "dapo", "gspo", "cispo")
BEGIN, END = "<!-- table: benchmarks/algorithms.py -->", "<!-- end of table -->"
PAGE = "# Which algorithm should I use?\n\nMeasured, not believed:\n\n"

# What a preset cannot do without. Everything else is the same for all.
OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "decoupled_ppo": {"train": {"old": "trainer"}},
    "ppo": {"train": {"critic": {"lr": 1e-3, "warmup_steps": 5}}},
}
NOTES = {
    "reward_model": "a reward model, no policy: held-out pair accuracy; chance is 50 %",
    "sft": "more of the warm start",
    "dapo": "dropped groups are sampled again, so a step costs more",
    "ppo": "the first 5 steps train the critic alone",
}


@dataclass
class Result:
    """One preset over its seeds: accuracy in 0..1, seconds of training without evaluations."""

    preset: str
    before: float
    after: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """The shared start, the questions on disk, and the sizes."""

    out: Path
    start: Path
    options: argparse.Namespace

    def run(self, preset: str, seed: int) -> tuple[float, float, float]:
        """(accuracy before, after, seconds of steps). A finished run in `out` is read instead."""
        offline = preset in OFFLINE_PRESETS
        config = self._offline(preset, seed) if offline else self._online(preset, seed)
        result = quintet.train(config, out=self.out / "runs" / f"{preset}-{seed}")
        rows = read_metrics(result.folder / "metrics.jsonl")
        seconds = sum(row.get("time/step_s", 0.0) for row in rows)
        if preset == "reward_model":
            summary = result.summary
            return summary["eval/pair_accuracy_before"], summary["eval/pair_accuracy_after"], seconds
        if offline:
            return self._accuracy(self.start), self._accuracy(result.folder / "final"), seconds
        return result.summary["eval/accuracy_before"], result.summary["eval/accuracy_after"], seconds

    def _online(self, preset: str, seed: int) -> dict[str, Any]:
        o, own = self.options, OWN_OPTIONS.get(preset, {})
        return self._common(preset, seed, o.steps) | {
            "data": {"source": str(self.out / "train.jsonl"), "eval_source": str(self.out / "held_out.jsonl")},
            "rollout": {"groups_per_step": o.groups, "group_size": o.group_size, "max_tokens": 8},
            "reward": {"functions": [{"fn": "exact"}]},
            "train": {"lr": o.lr, **own.get("train", {})},
        }

    def _offline(self, preset: str, seed: int) -> dict[str, Any]:
        o = self.options
        return self._common(preset, seed, o.offline_steps) | {
            "data": {
                "source": str(self.out / "pairs.jsonl"),
                "eval_source": str(self.out / "held_out_pairs.jsonl"),
            },
            "offline": {"batch_size": o.groups * o.group_size},
            "train": {"lr": o.offline_lr},
        }

    def _common(self, preset: str, seed: int, steps: int) -> dict[str, Any]:
        log = {"console": "quiet", "samples_per_step": 0}
        model = {"name": str(self.start)}
        return {
            "name": preset,
            "steps": steps,
            "seed": seed,
            "model": model,
            "algorithm": {"preset": preset},
            "log": log,
        }

    def _accuracy(self, folder: Path) -> float:
        config = self._online("grpo", 0) | {"model": {"name": str(folder)}}
        return quintet.evaluate(config)["eval/accuracy"]


def prepare(options: argparse.Namespace, out: Path) -> Bench:
    """Write the questions and make the warm start, once per `out`. The model and the split are those of seed 0."""
    config = load_config(RECIPE, ["seed=0", f"warm_start.steps={options.warm_start_steps}", *options.set])
    train, held_out = load_rows(config.data, 0)
    by_prompt = {row.values["prompt"]: row.values for row in task_rows("sums_pairs", config.data.args, 0)}
    for name, rows in (("train", train), ("held_out", held_out)):
        values = [row.values for row in rows]
        _write_jsonl(out / f"{name}.jsonl", values)
        pairs = "pairs" if name == "train" else f"{name}_pairs"
        _write_jsonl(out / f"{pairs}.jsonl", [by_prompt[v["prompt"]] for v in values])
    start = out / "start" / "final"
    if not start.exists():
        quintet.sft(config, out=out / "start")
    return Bench(out, start, options)


def _write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(results: Sequence[Result], failed: Mapping[str, str], options: argparse.Namespace) -> str:
    """Markdown, the best first; spreads over seeds. `failed`: presets whose run ended early, and why."""
    papers = {row["preset"]: row["paper"] for row in preset_table()}
    lines = [
        f"{options.steps} steps of {options.groups} questions x {options.group_size} samples (offline presets: "
        f"{options.offline_steps} steps of as many pairs), after {options.warm_start_steps} supervised steps.",
        "",
        "| preset | paper | held-out accuracy before | after (mean ± deviation) | seeds | s | above its start | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: -fmean(r.after)):
        spread = f" ± {100 * pstdev(r.after):.1f}" if len(r.after) > 1 else ""
        above = "yes" if fmean(r.after) > r.before else "**no**"
        figures = f"{r.before:.1%} | {fmean(r.after):.1%}{spread} | {len(r.after)} | {fmean(r.seconds):.0f}"
        lines.append(f"| `{r.preset}` | {papers[r.preset]} | {figures} | {above} | {NOTES.get(r.preset, '')} |")
    lines += [f"| `{name}` | {papers[name]} | | | | | **no** | {why} |" for name, why in failed.items()]
    return "\n".join(lines)


def write_page(path: Path, text: str) -> None:
    """Put the table between its marks; the words around it are a person's and stay."""
    page = path.read_text(encoding="utf-8") if path.exists() else f"{PAGE}{BEGIN}\n{END}\n"
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise QuintetError(f"{path} has no lines {BEGIN!r} and {END!r} between which the table belongs")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="all", help="names with commas between, `headline`, or all")
    parser.add_argument("--steps", type=int, default=100, help="controller steps of presets that sample")
    parser.add_argument("--offline-steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the headline presets; the others get one")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--warm-start-steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--offline-lr", type=float, default=2e-4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the warm start's recipe")
    parser.add_argument("--out", type=Path, help="where runs are kept and found again; a new folder if absent")
    parser.add_argument("--page", type=Path, help="also write the table into this page")
    options = parser.parse_args(arguments)
    known = [*PRESETS, *OFFLINE_PRESETS]
    chosen = {"all": known, "headline": list(HEADLINE)}.get(options.presets, options.presets.split(","))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"unknown presets: {', '.join(unknown)}")
    options.presets = chosen
    return options


def run_preset(bench: Bench, preset: str, seeds: int) -> Result:
    """Raises QuintetError when a run cannot go on."""
    result = Result(preset, 0.0)
    for seed in range(seeds):
        result.before, after, seconds = bench.run(preset, seed)
        result.after.append(after)
        result.seconds.append(seconds)
        print(f"{preset} seed {seed}: {result.before:.1%} -> {after:.1%} in {seconds:.0f} s", flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parse(arguments)
    out = options.out or Path(tempfile.mkdtemp(prefix="bench-algorithms-"))
    out.mkdir(parents=True, exist_ok=True)
    bench, results = prepare(options, out), []
    failed: dict[str, str] = {}
    for preset in options.presets:
        try:
            results.append(run_preset(bench, preset, options.seeds if preset in HEADLINE else 1))
        except QuintetError as error:
            failed[preset] = str(error).splitlines()[0]
            print(f"{preset}: {error}", flush=True)
    text = table(results, failed, options)
    print(f"\n{text}\n\nruns: {out}")
    if options.page is not None:
        write_page(options.page, text)
    return results


if __name__ == "__main__":
    main()

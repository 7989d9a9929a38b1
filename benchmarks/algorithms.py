"""Every preset on one task from one start: preset x held-out accuracy x seconds.

    python benchmarks/algorithms.py --out bench --page docs/which_algorithm.md   # everything: ~25 min on two cores
    python benchmarks/algorithms.py --presets grpo,ppo --steps 40 --seeds 1

A tiny model is warm-started once (supervised, recipes/sums_tiny.yaml); each preset then trains from those weights on
the same questions, with the same number of samples a step and the same learning rate, and is asked 200 questions that
neither stage has seen (greedy). Offline presets get pairs made of the same questions. Seeds change sampling and order,
not the start and not the split. `--jobs` runs go on at a time, each in a process and on a thread of its own. They are
kept in --out: what is finished there is not run again, what was cut off goes on.

Left out: a learning rate tuned for each preset. A preset that would win with another one loses here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import quintet
from quintet.algorithms.docs import preset_table
from quintet.algorithms.presets import OFFLINE_PRESETS, PRESETS
from quintet.config import load_config
from quintet.data.dataset import load_rows
from quintet.data.tasks import task_rows
from quintet.files import write_whole
from quintet.observe.metrics import read_metrics
from quintet.types import QuintetError

RECIPE = Path(__file__).parents[1] / "recipes" / "sums_tiny.yaml"
HEADLINE = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "dapo", "gspo", "cispo")
BEGIN, END = "<!-- table: benchmarks/algorithms.py -->", "<!-- end of table -->"
PAGE = "# Which algorithm should I use?\n\nMeasured, not believed:\n\n"
Run = tuple[str, int]  # preset, seed
Figures = tuple[float, float, float]  # accuracy before and after, seconds of steps
SIZES = ("steps", "offline_steps", "groups", "group_size", "warm_start_steps", "lr", "offline_lr", "set")

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

    def run(self, preset: str, seed: int) -> Figures:
        """(accuracy before, after, seconds of steps). A finished run in `out` is read instead."""
        known = self.out / "results" / f"{preset}-{seed}.json"
        if not known.exists():
            figures = self._run(preset, seed)
            known.parent.mkdir(exist_ok=True)
            write_whole(known, json.dumps(figures))
        before, after, seconds = json.loads(known.read_text())
        return before, after, seconds

    def _run(self, preset: str, seed: int) -> Figures:
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
            "train": {"lr": o.lr, "warmup_steps": 10, **own.get("train", {})},
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
            "cluster": {"threads": 1},
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
    parser.add_argument("--steps", type=int, default=120, help="controller steps of presets that sample")
    parser.add_argument("--offline-steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the headline presets; the others get one")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--warm-start-steps", type=int, default=350)
    parser.add_argument("--lr", type=float, default=2e-4)
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


def runs_of(options: argparse.Namespace) -> Iterator[Run]:
    """(preset, seed): the first seed of all first, so that a table cut short has every preset."""
    for seed in range(options.seeds):
        yield from ((name, seed) for name in options.presets if seed == 0 or name in HEADLINE)


def end_with_parent() -> None:
    """A worker of a killed benchmark would go on training."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def outcomes(bench: Bench, todo: Sequence[Run], jobs: int) -> Iterator[tuple[Run, Callable[[], Figures]]]:
    """Each run as it ends, and what gives its figures or raises what it raised."""
    if jobs == 1:
        yield from (((preset, seed), partial(bench.run, preset, seed)) for preset, seed in todo)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent) as pool:
        started = {pool.submit(bench.run, preset, seed): (preset, seed) for preset, seed in todo}
        yield from ((started[future], future.result) for future in as_completed(started))


def run_all(bench: Bench, options: argparse.Namespace) -> tuple[list[Result], dict[str, str]]:
    """Results by preset in the order asked for, and of those whose run ended early why."""
    todo, began = list(runs_of(options)), time.monotonic()
    found: dict[Run, Figures] = {}
    failed: dict[str, str] = {}
    for done, ((preset, seed), figures) in enumerate(outcomes(bench, todo, options.jobs), start=1):
        try:
            before, after, seconds = found[preset, seed] = figures()
            said = f"{before:.1%} -> {after:.1%} in {seconds:.0f} s"
        except QuintetError as error:
            failed[preset] = str(error).splitlines()[0]
            said = str(error)
        print(f"[{done}/{len(todo)}, {time.monotonic() - began:.0f} s] {preset} seed {seed}: {said}", flush=True)
    results = []
    for preset in (name for name in options.presets if name not in failed):
        rows = [figures for key, figures in sorted(found.items()) if key[0] == preset]
        results.append(Result(preset, rows[0][0], [r[1] for r in rows], [r[2] for r in rows]))
    return results, failed


def require_same_sizes(out: Path, options: argparse.Namespace) -> None:
    """Runs of other sizes cannot stand in one table. Raises QuintetError naming the first that differs."""
    sizes, known = {name: getattr(options, name) for name in SIZES}, out / "sizes.json"
    if not known.exists():
        known.write_text(json.dumps(sizes))
    for name, value in json.loads(known.read_text()).items():
        if sizes[name] != value:
            raise QuintetError(f"{out} holds runs with --{name.replace('_', '-')} {value}: choose another --out")


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parse(arguments)
    out = options.out or Path(tempfile.mkdtemp(prefix="bench-algorithms-"))
    out.mkdir(parents=True, exist_ok=True)
    require_same_sizes(out, options)
    results, failed = run_all(prepare(options, out), options)
    text = table(results, failed, options)
    print(f"\n{text}\n\nruns: {out}")
    if options.page is not None:
        write_page(options.page, text)
    return results


if __name__ == "__main__":
    main()

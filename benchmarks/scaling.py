"""How the cost of a sampled token grows: with batch, group size, response length, vocabulary and what was there before.

    python benchmarks/scaling.py                       # all curves, about two minutes on two cores
    python benchmarks/scaling.py --curves response,finished --quick
    python benchmarks/scaling.py --kernels torch       # the engine's other path; without the hardware's bound
    python benchmarks/scaling.py --device cuda

The embedded engine, decoding, temperature 1, no end token. One curve per question:

    batch      1 to 128 samples of their own prompts
    group      128 samples in groups of 4 to 32 that share a prompt of 256 tokens
    response   32 samples, 64 to 1,024 tokens into their responses
    vocabulary 128 samples; the model's config with 12,288 to 98,304 entries, random weights
    finished   32 samples after 0 to 16,384 others have come and gone: nothing may grow

At each point the median decoding step is compared with what its matrix products and the reading of its KV take, both
measured beside it (native kernels only): a LIMIT line each, at most 1.25 is the aim. Prints a table, writes a page with
one chart per curve (HTML, no network), ends with the growth from the first point to the last.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from _sides import machine, write_page
from rollout import Embedded
from transformers import AutoModelForCausalLM, PreTrainedModel

from quintet.models.config import ModelConfig
from quintet.models.device import resolve_device, resolve_dtype
from quintet.models.loader import load_model
from quintet.observe.charts import Series, line_chart
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.fast import FastEngine
from quintet.types import Group, GroupId, Prompt, SamplingParams

STEPS = 24  # decoding steps timed at a point
AIM = 1.25
LONGEST = 1 << 20  # tokens: a sample that ends when it is aborted


@dataclass(frozen=True)
class Point:
    """One measurement. `bound_s`: products + KV; 0 where the kernels do not tell."""

    x: int
    samples: int
    step_s: float
    bound_s: float

    @property
    def token_us(self) -> float:
        return 1e6 * self.step_s / self.samples

    @property
    def bound_us(self) -> float:
        return 1e6 * self.bound_s / self.samples


@dataclass(frozen=True)
class Curve:
    name: str
    title: str
    x_label: str
    measure: Callable[[Bench, list[int]], Iterator[Point]]
    at: list[int]
    quick: list[int]


class Bench:
    """An engine, and steps timed on it."""

    def __init__(self, model: PreTrainedModel, kernels: str, device: torch.device, dtype: torch.dtype) -> None:
        pages = RolloutConfig().prefix_cache_pages  # of what finished, as in a run
        self.side = Embedded(model.to(dtype), kernels, device, dtype, prefix_pages=pages)
        self.vocabulary = model.config.vocab_size
        self._requests = 0

    @property
    def engine(self) -> FastEngine:
        return self.side.engine

    def start(self, prompts: int, size: int, samples: int, max_tokens: int = LONGEST) -> None:
        """Queue `samples` for each of `prompts` random prompts of `size` tokens."""
        for _ in range(prompts):
            self._requests += 1
            pick = random.Random(self._requests)
            ids = [pick.randrange(100, self.vocabulary) for _ in range(size)]
            group = Group(GroupId(f"g{self._requests}"), Prompt(str(self._requests), ids))
            self.engine.add_group(group, SamplingParams(n=samples, max_tokens=max_tokens, seed=self._requests))

    def settle(self) -> None:
        """Past the prompts."""
        self.engine.step()
        while self.engine.phase == "prefill":
            self.engine.step()

    def decode(self, x: int, steps: int = STEPS) -> Point:
        """The next steps, timed; the bound is measured after each quarter of them."""
        samples = self.engine.stats().running
        times, bounds = [], []
        for step in range(steps):
            began = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - began)
            if step % (steps // 4) == 0:
                bounds += self.side.bound()
        return Point(x, samples, median(times), median(bounds or [0.0]))

    def stop(self) -> None:
        self.engine.abort_requests(range(self.engine._intake.next_request + 1))
        self.engine.step()


def by_batch(bench: Bench, at: list[int]) -> Iterator[Point]:
    for samples in at:
        bench.start(samples, 40, 1)
        bench.settle()
        yield bench.decode(samples)
        bench.stop()


def by_group(bench: Bench, at: list[int]) -> Iterator[Point]:
    for size in at:
        bench.start(128 // size, 256, size)
        bench.settle()
        yield bench.decode(size)
        bench.stop()


def by_response(bench: Bench, at: list[int]) -> Iterator[Point]:
    bench.start(4, 40, 8)
    bench.settle()
    done = 1
    for tokens in at:
        for _ in range(tokens - STEPS - done):
            bench.engine.step()
        yield bench.decode(tokens)
        done = tokens
    bench.stop()


def by_finished(bench: Bench, at: list[int]) -> Iterator[Point]:
    finished = 0
    for count in at:
        while finished < count:
            bench.start(4, 8, 32, max_tokens=2)
            while bench.engine.has_work:
                finished += len(bench.engine.step())
        bench.start(4, 40, 8)
        bench.settle()
        yield bench.decode(count)
        bench.stop()


def by_vocabulary(make: Callable[[int], Bench], at: list[int]) -> Iterator[Point]:
    for size in at:
        bench = make(size)
        bench.start(16, 40, 8)
        bench.settle()
        yield bench.decode(size)


CURVES = [
    Curve("batch", "Batch", "samples", by_batch, [1, 8, 32, 64, 128], [1, 32, 128]),
    Curve("group", "Group size", "samples of a prompt; 128 in all", by_group, [4, 8, 16, 32], [4, 32]),
    Curve("response", "Response length", "tokens; 32 samples", by_response, [64, 128, 256, 512, 1024], [64, 128, 256]),
    Curve(
        "finished", "Finished sequences", "samples that ended before", by_finished, [0, 1024, 4096, 16384], [0, 1024]
    ),
]
VOCABULARY = ([12288, 24576, 49152, 98304], [12288, 49152])


def run_curve(name: str, points: Iterator[Point]) -> list[Point]:
    print(f"\n{name:>10}  samples   step ms  bound ms   us/token", flush=True)
    found = []
    for p in points:
        found.append(p)
        print(f"{p.x:10}  {p.samples:7}  {p.step_s * 1e3:8.2f}  {p.bound_s * 1e3:8.2f}  {p.token_us:9.1f}", flush=True)
    return found


def summary(name: str, points: list[Point]) -> str:
    """LIMIT lines where there is a bound, then how the step grew from the first point to the last."""
    lines = [
        f"LIMIT scaling_{name}_{p.x} {p.step_s / p.bound_s:.2f}x step={p.step_s * 1e3:.2f}ms "
        f"products+kv={p.bound_s * 1e3:.2f}ms aim={AIM}x"
        for p in points
        if p.bound_s
    ]
    first, last = points[0], points[-1]
    bound = f", the bound {last.bound_us / first.bound_us:.2f}x" if first.bound_s else ""
    grown = f"GROWTH scaling_{name} {last.token_us / first.token_us:.2f}x a token from {first.x} to {last.x}{bound}"
    return "\n".join([*lines, grown])


def chart(title: str, x_label: str, points: list[Point]) -> str:
    series = [Series("measured", [(p.x, p.token_us) for p in points])]
    if points[0].bound_s:
        series.append(Series(f"{AIM} x (products + KV)", [(p.x, AIM * p.bound_us) for p in points], dash="4 3"))
    return line_chart(f"{title}: microseconds a token", f"against {x_label}", series, floor=0.0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--curves", default="batch,group,response,vocabulary,finished")
    parser.add_argument("--kernels", default="auto", choices=["auto", "native", "torch"])
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="the ends of each curve, and short ones")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling.html"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    model = load_model(ModelConfig(name=args.model, device=args.device)).eval()

    def with_vocabulary(size: int) -> Bench:
        config = model.config.__class__.from_dict(model.config.to_dict() | {"vocab_size": size, "pad_token_id": None})
        torch.manual_seed(0)
        return Bench(AutoModelForCausalLM.from_config(config).to(device), args.kernels, device, dtype)

    bench = Bench(model, args.kernels, device, dtype)
    print(f"{machine()}, {args.model}, {dtype}, {bench.engine.model.path}", flush=True)
    wanted, results, charts = args.curves.split(","), [], []
    for curve in CURVES:
        if curve.name in wanted:
            points = run_curve(curve.name, curve.measure(bench, curve.quick if args.quick else curve.at))
            results.append(summary(curve.name, points))
            charts.append(chart(curve.title, curve.x_label, points))
    if "vocabulary" in wanted:
        points = run_curve("vocabulary", by_vocabulary(with_vocabulary, VOCABULARY[args.quick]))
        results.append(summary("vocabulary", points))
        charts.append(chart("Vocabulary", "entries; 128 samples", points))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_page(args.out, "Growth of the cost of a token", charts)
    print("\n" + "\n".join(results) + f"\ncharts: {args.out}")


if __name__ == "__main__":
    main()

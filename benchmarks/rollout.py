"""Sampled tokens per second: the embedded engine against transformers and vLLM, in turns, and against the hardware.

    python benchmarks/rollout.py                                   # fixed, long-tailed and shared-prompt workloads
    python benchmarks/rollout.py --vllm-python .venv-vllm/bin/python
    python benchmarks/rollout.py --workloads fixed --turns 5 --sides native,torch
    python benchmarks/rollout.py --device cuda

16 prompts x 8 samples, temperature 1, log-probabilities returned, no end token: `fixed` 128 new tokens after short
prompts, `tail` 8 to 256 (log-normal, the same for every side), `shared` 128 after prompts of 512 tokens. Sides:
`native` and `torch` (the embedded engine's two paths), `generate` (transformers, one padded batch until its longest
sample ends), `continuous` (transformers' continuous batching: a sixteenth of the tokens, since a CPU is slow at it, and
its rate once all prompts are done), `vllm` (a child process of another environment, stopped while others run; compiled,
tuned as benchmarks/NOTES.md says). Ends with RATIO lines, and for `native` with the time of a decoding step divided by
what its matrix products and the reading of its KV take, both measured beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _sides import Turns, alternate, machine, ratio_line
from _vllm_child import VllmChild
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from quintet.models.config import ModelConfig
from quintet.models.device import resolve_device, resolve_dtype
from quintet.models.loader import load_model
from quintet.models.smollm2 import smollm2_folder
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.build import make_engine
from quintet.rollout.engine.fast import FastEngine
from quintet.rollout.engine.native.model import NativeModel
from quintet.rollout.engine.step import PAGE
from quintet.types import Group, GroupId, Prompt, SamplingParams

PROMPTS, SAMPLES = 16, 8
WARM_CUT = 8  # of its tokens each side is given one in so many before the turns
CONTINUOUS_CUT = 16  # of its tokens that side is given one in so many
Side = Callable[["Workload"], float]  # tokens/s


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    lengths: list[int]  # new tokens per sample, samples of a prompt side by side

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def workload(name: str, vocabulary: int) -> Workload:
    pick = random.Random(name)
    size = 512 if name == "shared" else 40
    prompts = [[pick.randrange(100, vocabulary) for _ in range(size)] for _ in range(PROMPTS)]
    lengths = [128] * (PROMPTS * SAMPLES)
    if name == "tail":
        lengths = [min(256, max(8, round(pick.lognormvariate(4.0, 0.9)))) for _ in lengths]
    return Workload(name, prompts, lengths)


class Embedded:
    """The embedded engine with one kind of kernels."""

    def __init__(
        self, model: PreTrainedModel, kernels: str, device: torch.device, dtype: torch.dtype, *, prefix_pages: int = 0
    ) -> None:
        config = RolloutConfig.model_validate({"kernels": kernels, "prefix_cache_pages": prefix_pages})
        engine = make_engine(
            model.config,
            model.state_dict(),
            eos_ids=(),
            decode=lambda ids: "",
            config=config,
            device=device,
            dtype=dtype,
        )
        assert isinstance(engine, FastEngine)
        self.engine = engine
        self.step_s: list[float] = []  # of full decoding steps
        self.bound_s: list[float] = []  # what their products and KV take

    def __call__(self, work: Workload) -> float:
        engine = self.engine
        began, measuring = time.perf_counter(), 0.0
        for index, ids in enumerate(work.prompts):
            group = Group(GroupId(f"{work.name}{index}{began}"), Prompt(str(index), ids))
            engine.add_group(group, SamplingParams(n=SAMPLES, max_tokens=max(work.lengths), seed=index))
        for sequence, length in zip(engine._waiting, work.lengths, strict=True):
            sequence.max_new = length  # a sample's own end, as its end token would make it
        steps = 0
        while engine.has_work:
            start = time.perf_counter()
            engine.step()
            steps += 1
            if steps % 16 == 0 and engine.stats().running == len(work.lengths) and engine.phase == "decode":
                self.step_s.append(time.perf_counter() - start)
                self.bound_s += self.bound()
                measuring += time.perf_counter() - start - self.step_s[-1]
        return work.tokens / (time.perf_counter() - began - measuring)

    def bound(self) -> list[float]:
        """Seconds that the products of a decoding step and the reading of its KV take now; plain torch tells none."""
        model = self.engine.model
        if not isinstance(model, NativeModel):
            return []
        products = median(model.products_s(self.engine.stats().running) for _ in range(3))
        return [products + self._kv_bytes() / model.read_bandwidth(256)]

    def _kv_bytes(self) -> float:
        engine = self.engine
        per_token = (engine.model.bytes(1) - engine.model.bytes(0)) / 32
        own = int(engine._slots.cached[engine._slots.used].sum())
        return per_token * (own + sum(len(prompt.ids) for prompt in engine._prompts.values()))


def generate(model: PreTrainedModel, work: Workload) -> float:
    """One padded batch; a sample that has its tokens waits for the longest, as with an end token."""
    longest = max(work.lengths)
    rows = [ids for ids in work.prompts for _ in range(SAMPLES)]
    ids = torch.tensor(rows, device=model.device)
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
            eos_token_id=None,
        )
    return work.tokens / (time.perf_counter() - began)


def continuous(model: PreTrainedModel, work: Workload) -> float:
    """transformers' continuous batching, each sample a request with its own number of tokens."""
    lengths = [max(2, length // CONTINUOUS_CUT) for length in work.lengths]
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(lengths), eos_token_id=-1
    )
    pages = -(-(len(work.prompts[0]) + max(lengths)) // PAGE)
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=pages * len(lengths),
        max_batch_tokens=RolloutConfig().prefill_tokens,
        max_requests_per_batch=len(lengths),
        return_logprobs=True,
    )
    times: list[list[float]] = []  # of each request's tokens
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=batching
    ) as manager:
        for index, length in enumerate(lengths):
            prompt = work.prompts[index // SAMPLES]
            manager.add_request(prompt, f"r{index}", max_new_tokens=length, record_timestamps=True)
        while len(times) < len(lengths):
            result = manager.get_result(timeout=120)
            if result is None or result.error is not None:
                raise SystemExit(f"continuous batching stopped: {result or manager.background_thread_status}")
            if result.is_finished():
                times.append(result.timestamps)
    began = max(request[0] for request in times)
    return sum(t > began for request in times for t in request) / (max(request[-1] for request in times) - began)


def make_sides(wanted: list[str], model: PreTrainedModel, dtype: torch.dtype, vllm: VllmChild | None) -> dict[str, Any]:
    device = next(model.parameters()).device
    sides: dict[str, Any] = {}
    for name in wanted:
        if name in ("native", "torch"):
            sides[name] = Embedded(model, name, device, dtype)
        elif name == "generate":
            sides[name] = lambda work: generate(model, work)
        elif name == "continuous":
            sides[name] = lambda work: continuous(model, work)
        elif vllm is not None:
            sides[name] = lambda work: work.tokens / vllm.run(work.prompts, work.lengths, SAMPLES)
    return sides


def compare(work: Workload, sides: Mapping[str, Side], turns: int) -> None:
    print(f"{work.name}: {PROMPTS} x {SAMPLES}, {work.tokens} tokens, prompts of {len(work.prompts[0])}", flush=True)
    if "continuous" in sides:
        print(f"  continuous: a rate over one in {CONTINUOUS_CUT} of each sample's tokens, its prompts not counted")
    short = replace(work, lengths=[max(2, length // WARM_CUT) for length in work.lengths])
    for side in sides.values():
        side(short)  # warm
    found: Turns = alternate({name: lambda side=side: side(work) for name, side in sides.items()}, turns)
    rates = {name: median(values) for name, values in found.items()}
    for ours in ("native", "torch"):
        for peer in rates:
            if ours in rates and peer not in ("native", "torch"):
                name = f"rollout_{work.name}" + ("" if ours == "native" else "_torch")
                print(ratio_line(name, 1 / rates[ours], 1 / rates[peer], peer=f"{peer}_s_per_token"), flush=True)
        if ours in rates:
            print(f"  {ours}: {rates[ours]:.0f} tokens/s")
    native = sides.get("native")
    if isinstance(native, Embedded) and native.bound_s:
        step, bound = median(native.step_s), median(native.bound_s)
        share = median(s / b for s, b in zip(native.step_s, native.bound_s, strict=True))
        print(f"LIMIT rollout_{work.name} {share:.2f}x step={step * 1e3:.1f}ms products+kv={bound * 1e3:.1f}ms")
        native.step_s.clear()
        native.bound_s.clear()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--workloads", default="fixed,tail,shared")
    parser.add_argument("--sides", default="native,torch,generate,continuous,vllm")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--vllm-python", type=Path, help="an interpreter that has vLLM; without it that side is left out"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    model = load_model(ModelConfig(name=args.model, device=args.device)).to(dtype).eval()
    wanted = [s for s in args.sides.split(",") if s != "native" or device.type == "cpu"]
    vllm = None
    if "vllm" in wanted and args.vllm_python is not None:
        folder = smollm2_folder() if args.model == "builtin:smollm2-135m" else Path(args.model)
        vllm = VllmChild(args.vllm_python, folder, dtype=dtype, device=args.device, running=PROMPTS * SAMPLES)
    print(f"{machine()}, {args.model}, {dtype}, {args.turns} turns", flush=True)
    try:
        sides = make_sides(wanted, model, dtype, vllm)
        for name in args.workloads.split(","):
            compare(workload(name, model.config.vocab_size), sides, args.turns)
    finally:
        if vllm is not None:
            vllm.close()


if __name__ == "__main__":
    main()

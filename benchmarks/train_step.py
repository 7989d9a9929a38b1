"""Forward and backward of one GRPO step, quintet against TRL: the same samples, advantages, loss and weights.

    python benchmarks/train_step.py                              # 512 + 128 and 50 + 64 tokens, groups of 8
    python benchmarks/train_step.py --shapes 50+64 --turns 5
    python benchmarks/train_step.py --dtype float32 --device cuda

Lengths are prompt + response tokens. `trl`: both sides on `--groups` groups. `half`: half of 8 groups, the batch of
grpo_step.py, have no signal (all rewards equal); against training all of them, as TRL does. `lora`: rank 16 on all
linear layers against full. `memory`: peak resident bytes of each side alone in a process of its own, one optimizer
step over `--groups` groups, one group in a forward. TRL runs with activation checkpointing off, for time with the
micro-batch that was quickest of those tried.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _sides import alternate, machine, matmul_flops, print_ratio, ratio_line

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import resolve
from quintet.models.config import LoraConfig, ModelConfig
from quintet.models.device import resolve_device, resolve_dtype
from quintet.models.loader import load_model, load_tokenizer
from quintet.models.lora import apply_lora
from quintet.train.config import TrainConfig
from quintet.train.worker import LocalTrainWorker
from quintet.types import Experience, ExperienceBatch, GroupId, Span, VersionRun
from quintet.weights.memory import MemoryStore

Shape = tuple[int, int]
STEP_GROUPS = 8  # of a GRPO step


def samples(shape: Shape, options: argparse.Namespace, groups: int, *, half: bool = False) -> list[Experience]:
    """Groups of random ids; advantages sum to 0 in a group. `half`: every second group has none."""
    rng, out = random.Random(0), []
    for g in range(groups):
        prompt = [rng.randrange(4, options.vocab) for _ in range(shape[0])]
        for i in range(options.group_size):
            response = [rng.randrange(4, options.vocab) for _ in range(shape[1])]
            advantage = 0.0 if half and g % 2 else (1.0 if i % 2 else -1.0)
            out.append(
                Experience(
                    group_id=GroupId(f"p{g}"),
                    sample_index=i,
                    prompt_ids=prompt,
                    response_ids=response,
                    logprobs=[-1.0] * shape[1],
                    loss_mask=[1] * shape[1],
                    reward=float(i % 2),
                    weight_version=0,
                    weight_versions=[VersionRun(0, shape[1])],
                    advantages=[advantage] * shape[1],
                )
            )
    return out


class Ours:
    """Seconds of forward and backward of one `update` (its optimizer step is left out)."""

    def __init__(self, options: argparse.Namespace, *, lora: bool = False, **settings: Any) -> None:
        config = ModelConfig(name=options.model, device=options.device)
        model: Any = load_model(config, seed=0)
        if lora:
            model = apply_lora(model, LoraConfig(), 0)
        device = resolve_device(options.device)
        self.worker = LocalTrainWorker(
            model.to(device),
            tokenizer=load_tokenizer(config),
            config=TrainConfig(lr=0.0, **settings),
            algorithm=resolve(AlgorithmConfig.model_validate({"preset": "grpo"})),
            temperature=1.0,
            total_steps=1000,
            dtype=resolve_dtype(options.dtype, device),
            store=MemoryStore(),
            on_span=self._on_span,
        )
        self._seconds = 0.0

    def _on_span(self, span: Span) -> None:
        if span.name in ("forward", "backward"):
            self._seconds += span.end - span.start

    def turn(self, batch: list[Experience]) -> float:
        self._seconds = 0.0
        asyncio.run(self.worker.update(ExperienceBatch(step=1, version=0, experiences=batch)))
        return self._seconds


class Trl:
    """Seconds of `GRPOTrainer`'s own loss and backward over the same samples, in micro-batches of `size` samples."""

    def __init__(self, options: argparse.Namespace) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        config = ModelConfig(name=options.model, device=options.device)
        device = resolve_device(options.device)
        self.settings = {
            "gradient_checkpointing": False,
            "bf16": resolve_dtype(options.dtype, device) == torch.bfloat16,
            "loss_type": "grpo",
            "beta": 0.0,
            "num_generations": options.group_size,
            "per_device_train_batch_size": options.group_size,
            "use_cpu": device.type == "cpu",
            "report_to": "none",
            "save_strategy": "no",
        }
        self.trainer = GRPOTrainer(
            model=load_model(config, seed=0),
            args=GRPOConfig(output_dir=tempfile.mkdtemp(prefix="trl-"), **self.settings),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            processing_class=load_tokenizer(config).hf,
        )
        self.trainer.model.to(device).train()
        self._device = device

    def turn(self, batch: list[Experience], size: int, *, optimizer: bool = False) -> float:
        """`optimizer`: a step of it afterwards, outside the clock."""
        trainer, runs = self.trainer, [batch[i : i + size] for i in range(0, len(batch), size)]
        trainer.current_gradient_accumulation_steps = len(runs)
        inputs = [self._inputs(run) for run in runs]
        start = time.perf_counter()
        for one in inputs:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, one)
            trainer.accelerator.backward(loss)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if optimizer:
            trainer.create_optimizer().step()
        trainer.model.zero_grad(set_to_none=True)
        return seconds

    def _inputs(self, run: list[Experience]) -> dict[str, torch.Tensor]:
        prompts, responses = ([getattr(e, f"{side}_ids") for e in run] for side in ("prompt", "response"))
        tensors = {
            "prompt_ids": torch.tensor(prompts),
            "completion_ids": torch.tensor(responses),
            "advantages": torch.tensor([(e.advantages or [0.0])[0] for e in run]),
        }
        tensors |= {f"{side}_mask": torch.ones_like(tensors[f"{side}_ids"]) for side in ("prompt", "completion")}
        return {name: t.to(self._device) for name, t in tensors.items()}

    def best_size(self, batch: list[Experience], options: argparse.Namespace) -> int:
        """The quickest micro-batch: twice a group, halved as long as that helps; after one turn to warm up."""
        size = min(len(batch), 2 * options.group_size)
        self.turn(batch, options.group_size)
        seconds = {size: self.turn(batch, size)}
        while size > 1:
            seconds[size // 2] = self.turn(batch, size // 2)
            if seconds[size // 2] > seconds[size]:
                break
            size //= 2
        print("  TRL micro-batches tried:", ", ".join(f"{size}: {s:.2f} s" for size, s in seconds.items()))
        return min(seconds, key=lambda size: seconds[size])


def compare(shape: Shape, ours: Ours, trl: Trl, options: argparse.Namespace) -> None:
    label = f"{shape[0]}+{shape[1]}"
    full = samples(shape, options, options.groups)
    print(f"\n{options.groups} groups x {options.group_size} samples, {label} tokens")
    size = trl.best_size(full, options)
    ours.turn(full)
    sides: dict[str, Callable[[], float]] = {
        "trl": lambda: trl.turn(full, size),
        "quintet": lambda: ours.turn(full),
    }
    found = alternate(sides, options.turns)
    print_ratio(f"train_step_{label}", found, peer="trl")
    tokens = options.groups * (shape[0] + options.group_size * (shape[1] - 1))
    body = sum(p.numel() for n, p in ours.worker.model.named_parameters() if "embed" not in n and "lm_head" not in n)
    head = options.groups * options.group_size * shape[1] * options.vocab * ours.worker.model.config.hidden_size
    flops = 6.0 * tokens * body + 8.0 * head  # the head's logits are computed again in backward
    dtype = resolve_dtype(options.dtype, resolve_device(options.device))
    peak = matmul_flops(1024, 576, 1536, dtype, options.device if options.device != "auto" else "cpu")
    share = flops / median(found["quintet"]) / peak
    print(f"  quintet at {share:.0%} of this machine's matrix products ({peak / 1e9:.0f} GFLOP/s at 1024 rows)")


def compare_half(shape: Shape, ours: Ours, options: argparse.Namespace) -> None:
    full, half = (samples(shape, options, STEP_GROUPS, half=half) for half in (False, True))
    ours.turn(full)
    found = alternate({"all": lambda: ours.turn(full), "quintet": lambda: ours.turn(half)}, options.turns)
    print_ratio(f"half_without_signal_{shape[0]}+{shape[1]}", found, peer="all")


def compare_lora(shape: Shape, ours: Ours, options: argparse.Namespace) -> None:
    adapted, batch = Ours(options, lora=True), samples(shape, options, options.groups)
    adapted.turn(batch)
    found = alternate({"full": lambda: ours.turn(batch), "quintet": lambda: adapted.turn(batch)}, options.turns)
    print_ratio(f"lora_{shape[0]}+{shape[1]}", found, peer="full")


def child(options: argparse.Namespace) -> None:
    """One side alone, one step: prints its peak memory as JSON."""
    prompt, response = shape = parse_shape(options.shapes)
    batch, size = samples(shape, options, options.groups), options.group_size
    if options.child == "quintet":
        Ours(options, micro_batch_tokens=prompt + size * (response - 1)).turn(batch)
    else:
        Trl(options).turn(batch, size, optimizer=True)
    print(json.dumps({"peak_bytes": peak_memory(options.device)}))


def peak_memory(device: str) -> int:
    """Bytes: of the GPU, or resident (VmHWM: getrusage's figure starts from the parent's)."""
    if resolve_device(device).type == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def compare_memory(shape: Shape, options: argparse.Namespace) -> None:
    peaks = {}
    for side in ("trl", "quintet"):
        command = [sys.executable, __file__, "--child", side, "--shapes", f"{shape[0]}+{shape[1]}"]
        command += ["--dtype", options.dtype]
        command += ["--groups", str(options.groups), "--group-size", str(options.group_size), "--model", options.model]
        command += ["--vocab", str(options.vocab), "--device", options.device]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks[side] = json.loads(out.strip().splitlines()[-1])["peak_bytes"]
    line = ratio_line(
        f"memory_{shape[0]}+{shape[1]}", peaks["quintet"] / 1e9, peaks["trl"] / 1e9, peer="trl", unit="GB"
    )
    print(line, flush=True)


def parse_shape(text: str) -> Shape:
    prompt, response = text.split("+")
    return int(prompt), int(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--shapes", default="512+128,50+64")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocab", type=int, default=49_000, help="ids are drawn below this")
    parser.add_argument("--parts", default="trl,half,lora,memory", help="which comparisons")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    print(machine())
    shapes = [parse_shape(text) for text in options.shapes.split(",")]
    parts = options.parts.split(",")
    if "memory" in parts:
        compare_memory(shapes[0], options)
        parts.remove("memory")
    if not parts:
        return
    ours = Ours(options)
    if "trl" in parts:
        trl = Trl(options)
        print("TRL settings:", json.dumps(trl.settings))
        for shape in shapes:
            compare(shape, ours, trl, options)
        del trl
        gc.collect()
    if "half" in parts:
        compare_half(shapes[-1], ours, options)
    if "lora" in parts:
        compare_lora(shapes[-1], ours, options)


if __name__ == "__main__":
    main()

"""A whole GRPO step (generate, score, train, hand the weights over), quintet against TRL, in turns.

    python benchmarks/grpo_step.py                                # 8 x 8 x (50 + 64), 8 x 8 x (512 + 128), long tails
    python benchmarks/grpo_step.py --shapes 50+64 --turns 3 --steps 2
    python benchmarks/grpo_step.py --shapes 512+128 --warmup 0
    python benchmarks/grpo_step.py --model builtin:tiny --shapes 20+64
    python benchmarks/grpo_step.py --device cuda

A shape `P+N` is prompts of about P tokens and exactly N sampled ones (the end token is one that is never drawn);
`P+~N` lets the model end where it likes, after N tokens at most. Each turn is a process of its own: `--warmup` steps
(where a step takes minutes, 0 will do), then `--steps` timed ones. Both sides get the same model, prompts, reward,
learning rate, temperature and sizes. TRL runs with activation checkpointing off, its own paged or plain generation as
configured by default, the whole step in one generation batch, and micro-batches of `--trl-micro-batch` samples; its
settings are printed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _sides import alternate, machine, print_ratio

import quintet
from quintet.models.config import ModelConfig
from quintet.models.device import resolve_device, resolve_dtype
from quintet.models.loader import load_model, load_tokenizer
from quintet.observe.metrics import read_metrics

NEVER = "<jupyter_script>"  # a token of SmolLM2 that practically never comes
FILLER = "Here is a sum with its answer: {a} plus {b} makes {c}. "
QUESTION = "What is {a} plus {b}? Explain it to a child."


def spread_reward(completions: list[Any], **columns: Any) -> list[float]:
    """Seven values by a checksum of the text, so that every group has a signal."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [zlib.crc32(text.encode()) % 7 / 6 for text in texts]


def prompts(tokens: int, count: int, encode: Any) -> list[str]:
    """`count` prompts of at least `tokens` tokens, by worked examples in front of the question."""
    out = []
    for i in range(count):
        text, n = QUESTION.format(a=i + 3, b=2 * i + 1), 0
        while len(encode(text)) < tokens:
            n += 1
            text = FILLER.format(a=n + i, b=n, c=2 * n + i) + text
        out.append(text)
    return out


def model_folder(options: argparse.Namespace, folder: Path, *, natural_end: bool) -> str:
    """The model; with an end token that never comes where the length must be exact."""
    if natural_end:
        return str(options.model)
    if not (folder / "config.json").exists():
        config = ModelConfig(name=options.model)
        model, tokenizer = load_model(config, seed=0), load_tokenizer(config).hf
        if NEVER in tokenizer.get_vocab():
            tokenizer.eos_token = NEVER
            model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        tokenizer.chat_template = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def run_quintet(job: dict[str, Any]) -> list[float]:
    out = Path(tempfile.mkdtemp(prefix="grpo-step-"))
    config = {
        "steps": job["warmup"] + job["steps"],
        "model": {"name": job["model"], "device": job["device"], "dtype": job["dtype"]},
        "data": {"source": job["data"], "eval_size": 0},
        "rollout": {"groups_per_step": job["groups"], "group_size": job["group_size"], "max_tokens": job["new"]},
        "train": {"lr": 1e-6},
        "eval": {"every": 0},
        "log": {"console": "quiet", "samples_per_step": 0},
    }
    quintet.train(config, out=out, reward=spread_reward)
    seconds = [row["time/step_s"] for row in read_metrics(out / "metrics.jsonl") if "time/step_s" in row]
    shutil.rmtree(out)
    return seconds[job["warmup"] :]


def trl_settings(job: dict[str, Any]) -> dict[str, Any]:
    samples = job["groups"] * job["group_size"]
    device = resolve_device(job["device"])
    return {
        "max_steps": job["warmup"] + job["steps"],
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "temperature": 1.0,
        "num_generations": job["group_size"],
        "per_device_train_batch_size": job["trl_micro_batch"],
        "gradient_accumulation_steps": samples // job["trl_micro_batch"],
        "max_completion_length": job["new"],
        "loss_type": "grpo",
        "gradient_checkpointing": False,
        "bf16": resolve_dtype(job["dtype"], device) == torch.bfloat16,
        "use_cpu": device.type == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1000,
    }


def run_trl(job: dict[str, Any]) -> list[float]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = ModelConfig(name=job["model"], device=job["device"])
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.append(time.perf_counter())

    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    tokenizer = load_tokenizer(config).hf
    if tokenizer.chat_template is not None:
        rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    GRPOTrainer(
        model=load_model(config, seed=0),
        args=GRPOConfig(output_dir=tempfile.mkdtemp(prefix="trl-"), **trl_settings(job)),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        reward_funcs=[spread_reward],
        processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()
    return [b - a for a, b in pairwise(marks)][job["warmup"] :]


def timed_child(side: str, job: dict[str, Any]) -> float:
    """Median seconds of a timed step in a fresh process."""
    command = [sys.executable, __file__, "--child", side, "--job", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return median(found)


def compare(shape: str, options: argparse.Namespace, folder: Path) -> None:
    matched = re.fullmatch(r"(\d+)\+(~?)(\d+)", shape)
    if matched is None:
        raise SystemExit(f"--shapes {shape!r}: write 50+64 (exactly 64 tokens) or 50+~256 (256 at most)")
    natural, new = bool(matched[2]), int(matched[3])
    model = model_folder(options, folder / "model", natural_end=natural)
    tokenizer = load_tokenizer(ModelConfig(name=model)).hf
    data = folder / f"{shape}.jsonl"
    texts = prompts(int(matched[1]), 4 * options.groups, tokenizer.encode)
    data.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    job = {
        "model": model,
        "device": options.device,
        "dtype": options.dtype,
        "data": str(data),
        "groups": options.groups,
        "group_size": options.group_size,
        "new": new,
        "steps": options.steps,
        "warmup": options.warmup,
        "trl_micro_batch": options.trl_micro_batch,
    }
    print(f"\n{options.groups} x {options.group_size} x ({shape})\nTRL settings: {json.dumps(trl_settings(job))}")
    sides = {"trl": lambda: timed_child("trl", job), "quintet": lambda: timed_child("quintet", job)}
    print_ratio(f"grpo_step_{shape}", alternate(sides, options.turns), peer="trl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--shapes", default="50+64,512+128,50+~256")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them that are not timed")
    parser.add_argument("--trl-micro-batch", type=int, default=4, help="train_step.py finds the quickest")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", choices=["quintet", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        job = json.loads(options.job)
        print(json.dumps(run_quintet(job) if options.child == "quintet" else run_trl(job)))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes.split(","):
            compare(shape, options, Path(folder))


if __name__ == "__main__":
    main()

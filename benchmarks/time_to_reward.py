"""Seconds until a held-out accuracy, quintet against TRL: same model, data, sizes, learning rate and grader.

    python benchmarks/time_to_reward.py                        # both sides in turns, 30 steps each
    python benchmarks/time_to_reward.py --steps 15 --dtype bfloat16
    python benchmarks/time_to_reward.py --sides trl --device cuda

The recipe is recipes/smollm2_sums.yaml. Each side is a process of its own; they take turns of `--turn` seconds, one
stopped while the other runs, and only the seconds in which a side ran count. TRL is given its best on a CPU: float32
weights (bf16 autocast where the processor has it), activation checkpointing off, the whole step in one generation
batch, both threads; its settings are printed. Evaluation (greedy, every 5 steps, 100 held-out prompts) stands outside
both clocks. Needs the extra `quintet[bench]`. Writes a picture of both curves (HTML, no network) and ends with a RATIO
line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _sides import machine, ratio_line, write_page

import quintet
from quintet.cluster.build import Base, load_data, load_policy
from quintet.config import RunConfig, load_config
from quintet.models.device import resolve_device, resolve_dtype
from quintet.observe.charts import Series, line_chart
from quintet.observe.metrics import read_metrics
from quintet.reward.rules import number
from quintet.reward.sample import Sample
from quintet.types import Prompt

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_sums.yaml"
EVERY = 5
TRL_MICRO_BATCH = 4  # its quickest by train_step.py
Curve = list[tuple[float, float]]  # (training seconds, held-out greedy accuracy)


@dataclass
class Side:
    """A child process, and when it was allowed to run (Unix seconds)."""

    name: str
    process: subprocess.Popen[bytes]
    ran: list[tuple[float, float]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def seconds(self, start: float, end: float) -> float:
        """How much of [start, end] it ran."""
        return sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.ran)

    def turn(self, turn_s: float, others_alive: bool) -> None:
        """Let it run for a while; to its end when it is alone."""
        os.killpg(self.process.pid, signal.SIGCONT)
        began = time.time()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(turn_s if others_alive else None)
        if self.alive:
            os.killpg(self.process.pid, signal.SIGSTOP)
        self.ran.append((began, time.time()))


def run_in_turns(commands: dict[str, list[str]], turn_s: float, out: Path) -> list[Side]:
    sides = []
    for name, command in commands.items():
        with (out / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        os.killpg(process.pid, signal.SIGSTOP)
        sides.append(Side(name, process))
    try:
        while any(side.alive for side in sides):
            for side in sides:
                if side.alive:
                    side.turn(turn_s, any(other.alive for other in sides if other is not side))
    finally:
        for side in sides:
            if side.alive:
                os.killpg(side.process.pid, signal.SIGKILL)
    for side in sides:
        if side.process.returncode != 0:
            raise SystemExit(f"{side.name} failed:\n{(out / f'{side.name}.log').read_text()[-3000:]}")
    return sides


def curve_of(side: Side, out: Path) -> Curve:
    """Training seconds are the sum of the steps' own; evaluations lie between the steps."""
    steps, accuracies = (quintet_marks if side.name == "quintet" else trl_marks)(out / side.name)
    curve, seconds = [], 0.0
    for step in range(len(steps) + 1):
        seconds += side.seconds(*steps[step - 1]) if step else 0.0
        if step in accuracies:
            curve.append((seconds, accuracies[step]))
    return curve


Marks = tuple[list[tuple[float, float]], dict[int, float]]  # begin and end of each step (Unix seconds), accuracies


def quintet_marks(folder: Path) -> Marks:
    """From the run's own time line and metrics."""
    lines = [
        json.loads(line.rstrip(",\n")) for line in (folder / "trace.json").read_text().splitlines() if len(line) > 2
    ]
    begun = next(line["args"]["begun"] for line in lines if line["name"] == "process_name")
    spans = [line for line in lines if line["ph"] == "X" and line["name"].startswith("step ")]
    steps = [(begun + s["ts"] / 1e6, begun + (s["ts"] + s["dur"]) / 1e6) for s in spans]
    rows = read_metrics(folder / "metrics.jsonl")
    return steps, {int(r["step"]): r["eval/accuracy"] for r in rows if r.get("eval/accuracy") is not None}


def trl_marks(folder: Path) -> Marks:
    steps: list[tuple[float, float]] = []
    accuracies: dict[int, float] = {}
    for line in (folder / "marks.jsonl").read_text().splitlines():
        mark = json.loads(line)
        if "accuracy" in mark:
            accuracies[mark["step"]] = mark["accuracy"]
        else:
            steps.append((mark["began"], mark["ended"]))
    return steps, accuracies


def trl_side(config: RunConfig, out: Path) -> None:
    """Train, and write `marks.jsonl`: when each step began and ended, and the accuracies."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    base = Base.of(config)
    data = load_data(config, base)
    out.mkdir(parents=True, exist_ok=True)
    marks = (out / "marks.jsonl").open("w", buffering=1)

    def evaluate(trained: Any, step: int) -> None:
        accuracy = greedy_accuracy(trained, base, data.held_out, config.rollout.max_tokens)
        marks.write(json.dumps({"step": step, "accuracy": accuracy}) + "\n")

    class Marks(TrainerCallback):
        began = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            evaluate(kwargs["model"], 0)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began = time.time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.write(json.dumps({"step": state.global_step, "began": self.began, "ended": time.time()}) + "\n")
            if state.global_step % EVERY == 0:
                evaluate(kwargs["model"], state.global_step)

    rows = [{"prompt": [{"role": "user", "content": p.text}], "answer": p.answer} for p in data.train]
    trainer = GRPOTrainer(
        model=load_policy(config.model),
        args=GRPOConfig(**trl_settings(config, out)),
        train_dataset=Dataset.from_list(rows),
        reward_funcs=[last_number_reward],
        processing_class=base.tokenizer.hf,
        callbacks=[Marks()],
    )
    trainer.train()


def trl_settings(config: RunConfig, out: Path) -> dict[str, Any]:
    rollout = config.rollout
    samples = rollout.groups_per_step * rollout.group_size
    return {
        "output_dir": str(out),
        "max_steps": config.steps,
        "learning_rate": config.train.lr,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "temperature": rollout.temperature,
        "num_generations": rollout.group_size,
        "per_device_train_batch_size": TRL_MICRO_BATCH,
        "gradient_accumulation_steps": samples // TRL_MICRO_BATCH,
        "max_completion_length": rollout.max_tokens,
        "loss_type": "grpo",
        "gradient_checkpointing": False,
        "bf16": resolve_dtype(config.model.dtype, resolve_device(config.model.device)) == torch.bfloat16,
        "use_cpu": config.model.device == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1000,
        "seed": config.seed,
    }


def last_number_reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [number_verdict(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]


def number_verdict(text: str, answer: str) -> float:
    """The recipe's own rule: 1 when the last number of the text is the answer."""
    value = number(Sample(prompt_id="", text=text, response_ids=[], truncated=False, answer=answer)).value
    return 0.0 if value is None else value


def greedy_accuracy(model: Any, base: Base, prompts: list[Prompt], max_tokens: int) -> float:
    """Left-padded greedy decoding through transformers, all prompts at once."""
    was_training = model.training
    model.eval()
    width = max(len(p.token_ids) for p in prompts)
    pad = base.tokenizer.pad_id
    ids = torch.tensor([[pad] * (width - len(p.token_ids)) + p.token_ids for p in prompts])
    mask = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(base.tokenizer.eos_ids),
            pad_token_id=pad,
        )
    model.train(was_training)
    texts = [base.tokenizer.decode(row[width:].tolist()) for row in out]
    return sum(number_verdict(t, p.answer or "") for t, p in zip(texts, prompts, strict=True)) / len(prompts)


def seconds_to(curve: Curve, accuracy: float) -> float | None:
    """Linear between the evaluations; None when the line was never passed."""
    for (t0, a0), (t1, a1) in pairwise(curve):
        if a1 >= accuracy > a0:
            return t0 + (t1 - t0) * (accuracy - a0) / (a1 - a0)
    return None


def picture(curves: dict[str, Curve], path: Path) -> None:
    """Both curves on one self-contained page."""
    series = [Series(name, [(round(t), 100 * a) for t, a in curve]) for name, curve in curves.items()]
    chart = line_chart("Held-out greedy accuracy, %", "against training seconds, SmolLM2-135M-Instruct on sums", series)
    write_page(path, "Time to reward", [chart])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sides", default="quintet,trl")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of both sides")
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--line", type=float, default=0.7, help="held-out accuracy to reach")
    options.add_argument("--turn", type=float, default=20.0, help="seconds of a turn")
    options.add_argument("--out", type=Path, default=Path("runs/time_to_reward"))
    options.add_argument("--child", choices=["quintet", "trl"], help=argparse.SUPPRESS)
    args = options.parse_args()
    overrides = [f"steps={args.steps}", f"seed={args.seed}", f"eval.every={EVERY}", f"model.device={args.device}"]
    config = load_config(RECIPE, [*overrides, f"model.dtype={args.dtype}", "algorithm.kl=null"])
    if args.child:
        run = trl_side if args.child == "trl" else quintet.train
        run(config, out=args.out / args.child)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.sides.split(",")
    for name in names:
        shutil.rmtree(args.out / name, ignore_errors=True)  # of an earlier comparison
    print(machine(), "TRL settings: " + json.dumps(trl_settings(config, args.out / "trl"), default=str), sep="\n")
    sides = run_in_turns({n: [sys.executable, *sys.argv, "--child", n] for n in names}, args.turn, args.out)
    curves = {side.name: curve_of(side, args.out) for side in sides}
    for name, curve in curves.items():
        for seconds, accuracy in curve:
            print(f"{name:8} {seconds:7.0f} s  {accuracy:.2f}")
    picture(curves, args.out / "curves.html")
    reached = {side: seconds_to(curve, args.line) for side, curve in curves.items()}
    ours, theirs = reached.get("quintet"), reached.get("trl")
    if ours is not None and theirs is not None:
        print(ratio_line("time_to_reward", ours, theirs, peer="trl"))
    else:
        print(f"no ratio: {args.line:.0%} was reached after {reached}")


if __name__ == "__main__":
    main()

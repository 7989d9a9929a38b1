"""Seconds until a held-out accuracy, quintet against TRL: same model, data, sizes, learning rate and grader.

    python benchmarks/time_to_reward.py                        # both sides, one after the other (about 30 min)
    python benchmarks/time_to_reward.py --sides trl --steps 20
    python benchmarks/time_to_reward.py --quintet-run runs/smollm2   # take quintet's curve from a finished run

The recipe is recipes/smollm2_sums.yaml. TRL is given its best on a CPU: float32 weights (bf16 autocast where the
processor has it), activation checkpointing off, the whole step in one generation batch, both threads; its settings
are printed. Evaluation (greedy, every 5 steps, 100 held-out prompts) stands outside both clocks. Needs the extra
`quintet[bench]`. Writes a picture of both curves (HTML, no network) and ends with a RATIO line.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import quintet
from quintet.cluster.build import Base, load_data, load_policy
from quintet.config import RunConfig, load_config
from quintet.models.device import resolve_device, resolve_dtype
from quintet.observe import charts
from quintet.observe.charts import Series, line_chart
from quintet.observe.metrics import read_metrics
from quintet.reward.rules import number
from quintet.reward.sample import Sample
from quintet.types import Prompt

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_sums.yaml"
EVERY = 5
Curve = list[tuple[float, float]]  # (training seconds, held-out greedy accuracy)


def quintet_side(config: RunConfig, out: Path) -> Curve:
    quintet.train(config, out=out)
    return curve_of_run(out)


def curve_of_run(folder: Path) -> Curve:
    """Training seconds are the sum of the steps' own; evaluations lie between the steps."""
    seconds, curve = 0.0, []
    for row in read_metrics(folder / "metrics.jsonl"):
        seconds += row.get("time/step_s") or 0.0
        if row.get("eval/accuracy") is not None:
            curve.append((seconds, row["eval/accuracy"]))
    return curve


def trl_side(config: RunConfig, out: Path) -> Curve:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    base = Base.of(config)
    data = load_data(config, base)
    model = load_policy(config.model)
    settings = trl_settings(config, out)
    print("TRL settings:", json.dumps(settings, default=str))
    curve: Curve = []
    clock = {"start": 0.0, "paused": 0.0}

    def evaluate(trained: Any) -> float:
        began = time.perf_counter()
        right = greedy_accuracy(trained, base, data.held_out, config.rollout.max_tokens)
        clock["paused"] += time.perf_counter() - began
        return right

    class Evaluation(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            curve.append((0.0, evaluate(kwargs["model"])))
            clock.update(start=time.perf_counter(), paused=0.0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds = time.perf_counter() - clock["start"] - clock["paused"]
            print(f"trl step {state.global_step} at {seconds:.0f} s", flush=True)
            if state.global_step % EVERY == 0:
                curve.append((seconds, evaluate(kwargs["model"])))
                print(f"trl accuracy {curve[-1][1]:.2f}", flush=True)

    rows = [{"prompt": [{"role": "user", "content": p.text}], "answer": p.answer} for p in data.train]
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        reward_funcs=[last_number_reward],
        processing_class=base.tokenizer.hf,
        callbacks=[Evaluation()],
    )
    trainer.train()
    return curve


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
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": 1,
        "max_completion_length": rollout.max_tokens,
        "loss_type": "grpo",
        "gradient_checkpointing": False,
        "bf16": resolve_dtype("auto", resolve_device(config.model.device)) == torch.bfloat16,
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
    style = (Path(charts.__file__).parent / "report.css").read_text()
    series = [Series(name, [(round(t), 100 * a) for t, a in curve]) for name, curve in curves.items()]
    chart = line_chart("Held-out greedy accuracy, %", "against training seconds, SmolLM2-135M-Instruct on sums", series)
    path.write_text(f"<!doctype html><meta charset=utf-8><title>Time to reward</title><style>{style}</style>{chart}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sides", default="quintet,trl")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--line", type=float, default=0.7, help="held-out accuracy to reach")
    options.add_argument("--out", type=Path, default=Path("runs/time_to_reward"))
    options.add_argument("--quintet-run", type=Path, help="a finished run of the recipe, in place of a new one")
    args = options.parse_args()
    overrides = [f"steps={args.steps}", f"seed={args.seed}", f"eval.every={EVERY}", f"model.device={args.device}"]
    config = load_config(RECIPE, overrides)
    args.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, Curve] = {}
    for side in args.sides.split(","):
        if side == "quintet":
            known = args.quintet_run
            curves[side] = curve_of_run(known) if known else quintet_side(config, args.out / "quintet")
        else:
            curves[side] = trl_side(config, args.out / "trl")
        (args.out / f"{side}.json").write_text(json.dumps(curves[side]))
        for seconds, accuracy in curves[side]:
            print(f"{side:8} {seconds:7.0f} s  {accuracy:.2f}")
    picture(curves, args.out / "curves.html")
    reached = {side: seconds_to(curve, args.line) for side, curve in curves.items()}
    ours, theirs = reached.get("quintet"), reached.get("trl")
    if ours is not None and theirs is not None:
        print(f"RATIO time_to_reward {theirs / ours:.2f}x trl={theirs:.0f}s quintet={ours:.0f}s")
    else:
        print(f"no ratio: {args.line:.0%} was reached after {reached}")


if __name__ == "__main__":
    main()

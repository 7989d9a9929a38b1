"""A trained reward model as a reward function: `fn: model, args: {path: FOLDER}`.

The folder is a Hugging Face sequence classifier with one label, such as the `final/` of a `reward_model` run. It runs
in this process on a thread of its own, one batch per group. Text is encoded by the model's own tokenizer (which need
not be the policy's); the reward is read at the last token, the end token that a whole response is given. A response
that was cut off has none, which no reward model was trained on: `missing_end_penalty` (TRL's `missing_eos_penalty`) is
taken off its reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quintet.reward.calling import GradingFunction, Signature
from quintet.reward.errors import FunctionFailed
from quintet.reward.sample import Sample, Verdict
from quintet.types import QuintetError

MODEL = "model"
_OPTIONS = ("path", "device", "batch_tokens", "missing_end_penalty")


def check_model_args(args: Any) -> None:
    """Before anything heavy loads. Raises QuintetError for a wrong option or a folder without a model."""
    unknown = [key for key in args if key not in _OPTIONS]
    if unknown:
        raise QuintetError(f"reward function `model` has no option `{unknown[0]}`; it has: {', '.join(_OPTIONS)}")
    path = args.get("path")
    if not isinstance(path, str) or not (Path(path) / "config.json").is_file():
        raise QuintetError(
            f"reward function `model`, option `path`: {path!r} is no model folder (it has no config.json)\n"
            "a run with algorithm.preset reward_model writes one to RUN/final"
        )
    penalty = args.get("missing_end_penalty", 0.0)
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or penalty < 0:
        raise QuintetError(f"reward function `model`: missing_end_penalty {penalty!r} must be a number, 0 or more")


class ModelGrader(GradingFunction):
    """Loads the model when made; called with the samples of one group."""

    def __init__(self, name: str, args: Any) -> None:
        check_model_args(args)
        super().__init__(name, _RewardModel(**args), rule=True)
        self.signature = Signature.TRL  # the samples of a group together

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample. Raises FunctionFailed when a sample cannot be encoded or the model fails."""
        try:
            return [Verdict(value) for value in self.function(samples)]
        except (QuintetError, RuntimeError) as error:
            raise FunctionFailed(f"{type(error).__name__}: {error}") from error


class _RewardModel:
    """The classifier with its tokenizer. `batch_tokens`: padded tokens per forward at most."""

    def __init__(
        self, path: str, device: str = "auto", batch_tokens: int = 8192, missing_end_penalty: float = 0.0
    ) -> None:
        from quintet.models.config import ModelConfig
        from quintet.models.loader import load_reward_model, load_tokenizer
        from quintet.models.tokenizer import PromptEncoder

        config = ModelConfig(name=path, device=device)
        self._model = load_reward_model(config)
        self._tokenizer = load_tokenizer(config)
        self._encode_prompt = PromptEncoder(self._tokenizer, config)
        self._batch_tokens = batch_tokens
        self._missing_end_penalty = missing_end_penalty

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        ids = [self._ids(sample) for sample in samples]
        rewards = [0.0] * len(ids)
        for rows in _batches([len(row) for row in ids], self._batch_tokens):
            for row, value in zip(rows, self._forward([ids[i] for i in rows]), strict=True):
                rewards[row] = value - self._missing_end_penalty * samples[row].truncated
        return rewards

    def _ids(self, sample: Sample) -> list[int]:
        end = [] if sample.truncated else [self._tokenizer.eos_ids[0]]
        text = sample.prompt_text if sample.messages is None else None
        return [*self._encode_prompt(sample.messages, text), *self._tokenizer.encode(sample.text), *end]

    def _forward(self, ids: list[list[int]]) -> list[float]:
        """Right-padded; the head is read at each row's last token, whatever id stands there."""
        import torch

        model: Any = self._model
        width = max(map(len, ids))
        input_ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids], device=model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=model.device)
        last = torch.tensor([len(row) - 1 for row in ids], device=model.device)
        with torch.inference_mode():
            hidden = model.base_model(input_ids=input_ids, attention_mask=mask).last_hidden_state
            at_end = hidden[torch.arange(len(ids), device=model.device), last]
            return model.score(at_end)[:, 0].float().tolist()


def _batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers, of similar length together, at most `max_tokens` padded tokens each (a longer row goes alone)."""
    out: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if out and (len(out[-1]) + 1) * lengths[row] <= max_tokens:
            out[-1].append(row)
        else:
            out.append([row])
    return out

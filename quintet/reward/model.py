"""A reward model in this process: `fn: model, args: {path: FOLDER}`.

The folder (or hub id) is any of the kinds that `models/reward_model.py` reads, such as the `final/` of a
`reward_model` run. It runs on a thread of its own, in batches of `batch_tokens` padded tokens at most, one group at a
time: which samples share a batch then depends on nothing but the group, so that a run in reproducible numerics gives
the same rewards every time. Text is encoded by the model's own tokenizer, which need not be the policy's.

What the model reads, `reads`:
- `turn` (the default, and what our `reward_model` runs train on): the prompt as the policy's would be built (with the
  tokenizer's chat template where there is one), the response, and the end token of a whole response, where the reward
  is read;
- `conversation`: prompt and response rendered together by the chat template, as published chat reward models want it.
A classifier that is no decoder reads its tokenizer's own form of the pair (prompt, response).

A response that was cut off has no end token, which no reward model was trained on: `missing_end_penalty` (TRL's
`missing_eos_penalty`) is taken off its reward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quintet.reward.calling import GradingFunction, Signature
from quintet.reward.errors import FunctionFailed
from quintet.reward.sample import Sample, Verdict
from quintet.types import QuintetError

if TYPE_CHECKING:
    from quintet.models.config import ModelConfig
    from quintet.reward.options import ModelOptions

MODEL = "model"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

Encoded = tuple[list[int], list[int] | None]  # ids, and token types where the tokenizer gives any


def check_model_args(args: Mapping[str, Any]) -> ModelOptions:
    """Before anything heavy loads. Raises QuintetError for a wrong option or a folder without a model."""
    from quintet.reward.options import ModelOptions, parse_options  # pydantic, which workers do without

    options = parse_options(ModelOptions, MODEL, {"path": None, **args})
    path = options.path
    if path is None or not ((Path(path) / "config.json").is_file() or _is_hub_id(path)):
        raise QuintetError(
            f"reward function `model`, option `path`: {path!r} is no model folder (it has no config.json)\n"
            "a run with algorithm.preset reward_model writes one to RUN/final"
        )
    return options


def _is_hub_id(path: str) -> bool:
    return _HUB_ID.fullmatch(path) is not None and not Path(path).exists()


class ModelGrader(GradingFunction):
    """Loads the model when made; called with the samples of one group."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        super().__init__(name, _LocalModel(check_model_args(args)), rule=True)
        self.signature = Signature.TRL  # the samples of a group together

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample. Raises FunctionFailed when a sample cannot be encoded or the model fails."""
        try:
            return [Verdict(value) for value in self.function(samples)]
        except (QuintetError, RuntimeError) as error:
            raise FunctionFailed(f"{type(error).__name__}: {error}") from error


class _LocalModel:
    """The model, and how a sample becomes ids for it."""

    def __init__(self, options: ModelOptions) -> None:
        from quintet.models.config import ModelConfig
        from quintet.models.reward_model import load_reward_model

        config = ModelConfig(name=options.path or "", device=options.device, dtype=options.dtype)
        self._model = load_reward_model(config, options.label)
        self._encode = _pair_encoder(config) if self._model.takes_pair else _row_encoder(config, options.reads)
        self._batch_tokens = options.batch_tokens
        self._missing_end_penalty = options.missing_end_penalty

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        encoded = [self._encode(sample) for sample in samples]
        rewards = [0.0] * len(encoded)
        for rows in _batches([len(ids) for ids, _ in encoded], self._batch_tokens):
            for row, value in zip(rows, self._forward([encoded[i] for i in rows]), strict=True):
                rewards[row] = value - self._missing_end_penalty * samples[row].truncated
        return rewards

    def _forward(self, encoded: Sequence[Encoded]) -> list[float]:
        types = [kinds for _, kinds in encoded if kinds is not None]
        return self._model.rewards([ids for ids, _ in encoded], types or None)


def _row_encoder(config: ModelConfig, reads: Literal["turn", "conversation"]) -> Callable[[Sample], Encoded]:
    from quintet.models.loader import load_tokenizer
    from quintet.models.tokenizer import PromptEncoder

    tokenizer = load_tokenizer(config)
    encode_prompt = PromptEncoder(tokenizer, config)

    def turn(sample: Sample) -> Encoded:
        end = [] if sample.truncated else [tokenizer.eos_ids[0]]
        text = sample.prompt_text if sample.messages is None else None
        return [*encode_prompt(sample.messages, text), *tokenizer.encode(sample.text), *end], None

    def conversation(sample: Sample) -> Encoded:
        return tokenizer.encode_conversation([*_messages(sample), {"role": "assistant", "content": sample.text}]), None

    if reads == "turn":
        return turn
    if not tokenizer.has_chat_template:
        raise QuintetError(
            f"reward function `model`, option `reads`: the tokenizer of {config.name!r} has no chat template: use turn"
        )
    return conversation


def _pair_encoder(config: ModelConfig) -> Callable[[Sample], Encoded]:
    from quintet.models.loader import load_plain_tokenizer

    hf = load_plain_tokenizer(config)

    def encode(sample: Sample) -> Encoded:
        prompt = "\n\n".join(str(message["content"]) for message in _messages(sample))
        out = hf(prompt, sample.text)
        return list(out["input_ids"]), list(out["token_type_ids"]) if "token_type_ids" in out else None

    return encode


def _messages(sample: Sample) -> list[dict[str, Any]]:
    return sample.messages if sample.messages is not None else [{"role": "user", "content": sample.prompt_text}]


def _batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers, of similar length together, at most `max_tokens` padded tokens each (a longer row goes alone)."""
    out: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if out and (len(out[-1]) + 1) * lengths[row] <= max_tokens:
            out[-1].append(row)
        else:
            out.append([row])
    return out

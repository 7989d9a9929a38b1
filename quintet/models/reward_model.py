"""A model that gives one number for a text: a sequence classifier, or a language model with a value head.

Three kinds of folder or hub id are read:
- a decoder's sequence classifier (`LlamaForSequenceClassification` ..., what a `reward_model` run writes): its `score`
  is applied to the last token, found by the row's length and not by a padding id;
- another sequence classifier (`BertForSequenceClassification` ...): its own logits, for a pair of texts;
- a causal language model whose folder also holds `v_head.summary.weight` (TRL's and LLaMA-Factory's value heads), in
  its own weights or in `value_head.safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from quintet.models.config import ModelConfig
from quintet.models.device import resolve_device, resolve_dtype
from quintet.models.loader import named, read_config
from quintet.models.quiet import quiet_transformers
from quintet.models.source import Source, resolve_source
from quintet.types import QuintetError

_VALUE_HEAD = "v_head.summary."


@dataclass(frozen=True)
class RewardModel:
    """Compute dtype `config.dtype`, the head and its output in float32; in evaluation mode.

    `takes_pair`: it wants prompt and response as a pair in its tokenizer's own form, instead of one row of ids.
    """

    body: nn.Module
    head: Callable[[Tensor], Tensor] | None  # None: `body` gives logits
    label: int
    pad_id: int
    device: torch.device

    @property
    def takes_pair(self) -> bool:
        return self.head is None

    @torch.inference_mode()
    def rewards(self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> list[float]:
        """One number per row of ids, padded on the right; `types`: the token types of pairs."""
        width = max(map(len, rows))
        inputs = {
            "input_ids": self._padded(rows, width, self.pad_id),
            "attention_mask": self._padded([[1] * len(row) for row in rows], width, 0),
        }
        if types is not None:
            inputs["token_type_ids"] = self._padded(types, width, 0)
        if self.head is None:
            out_NL = self.body(**inputs).logits
        else:
            hidden_NTD = self.body(**inputs).last_hidden_state
            last_N = torch.tensor([len(row) - 1 for row in rows], device=self.device)
            out_NL = self.head(hidden_NTD[torch.arange(len(rows), device=self.device), last_N].float())
        values: list[float] = out_NL[:, self.label].float().tolist()
        return values

    def _padded(self, rows: Sequence[Sequence[int]], width: int, fill: int) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], device=self.device)


def load_reward_model(config: ModelConfig, label: int | None = None) -> RewardModel:
    """`label`: which of several outputs is the reward; None: the only one.

    Raises QuintetError for a model of another kind, and for several labels of which none is named.
    """
    source = resolve_source(config)
    hf_config: Any = read_config(source, config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    body, head = _load(source, hf_config, config)
    body.to(device, dtype).eval()
    if isinstance(head, nn.Module):
        head.to(device, torch.float32)
    labels = hf_config.num_labels if _is_classifier(hf_config) else 1
    if label is None and labels != 1:
        names = ", ".join(f"{i} {name}" for i, name in sorted(hf_config.id2label.items()))
        raise QuintetError(f"{config.name!r} has {labels} labels: say which one is the reward, label: N ({names})")
    if label is not None and label >= labels:
        raise QuintetError(f"{config.name!r} has {labels} labels, counted from 0: there is no label {label}")
    return RewardModel(body, head, label or 0, hf_config.pad_token_id or 0, device)


def _load(source: Source, hf_config: Any, config: ModelConfig) -> tuple[nn.Module, nn.Module | None]:
    if _is_classifier(hf_config):
        model: Any = _from_pretrained(AutoModelForSequenceClassification, source, config)
        head = dict(model.named_children()).get("score")
        return (model, None) if head is None else (model.base_model, head)
    weights = _value_head(Path(source.path)) if source.is_local else {}
    if not weights:
        kinds = ", ".join(hf_config.architectures or []) or "unnamed"
        raise QuintetError(
            f"{config.name!r} is no reward model: it is {kinds}, and neither a sequence classifier nor a folder with "
            f"a value head ({_VALUE_HEAD}weight)"
        )
    lm: Any = _from_pretrained(AutoModelForCausalLM, source, config)
    return lm.get_decoder(), _linear(weights)


def _is_classifier(hf_config: Any) -> bool:
    return any(kind.endswith("ForSequenceClassification") for kind in hf_config.architectures or [])


def _from_pretrained(kind: Any, source: Source, config: ModelConfig) -> PreTrainedModel:
    attention = None if config.attention == "auto" else config.attention
    with quiet_transformers(), named(config, "model"):
        model: PreTrainedModel = kind.from_pretrained(
            source.path,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            **source.hub_kwargs,
        )
    return model


def _value_head(folder: Path) -> dict[str, Tensor]:
    """`weight` and perhaps `bias` of the head, wherever in the folder's safetensors files they are."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(_VALUE_HEAD)]  # noqa: SIM118 (no mapping)
            found |= {name.removeprefix(_VALUE_HEAD): file.get_tensor(name).float() for name in names}
    return found


def _linear(weights: dict[str, Tensor]) -> nn.Linear:
    head = nn.Linear(weights["weight"].shape[1], 1, bias="bias" in weights)
    head.load_state_dict(weights)
    return head

"""A language model's body with a head of one number per token: PPO's critic, and the reward model.

The body is a copy of the policy (LoRA merged), so that it starts from what the policy knows. It goes through the same
packed forward; the value of a token is read where the token is predicted, so V(s_t) has seen everything before
token t and nothing of it. Left out: a value head on the policy's own body (its loss would move the policy).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quintet.train.config import TrainConfig
from quintet.train.forward import Layout, PolicyForward
from quintet.train.packing import TokenSample


class ValueModel(nn.Module):
    """`body`: a causal language model whose output embedding is not used. The head starts at 0: every value is 0.

    A policy's LoRA adapters are merged into the body, which is trained whole; or with `keep_adapters` only they are.
    """

    def __init__(self, policy: nn.Module, *, bias: bool = True, keep_adapters: bool = False) -> None:
        super().__init__()
        body: Any = copy.deepcopy(policy) if keep_adapters and _has_adapters(policy) else plain_copy(policy)
        self.body = body
        self.head = nn.Linear(self.body.config.get_text_config().hidden_size, 1, bias=bias)
        nn.init.zeros_(self.head.weight)
        if bias:
            nn.init.zeros_(self.head.bias)
        self.head.to(self.body.device)
        self.head.requires_grad_(True)


@dataclass(frozen=True)
class TokenValues:
    """float32 [B, T], T the longest response; 0 where the loss mask is 0."""

    values_BT: Tensor
    rows: int  # tokens that went through the decoder, padding included


class ValueForward:
    """Values of samples' loss tokens, packed as the policy's samples are. `release()` as in `PolicyForward`."""

    def __init__(self, model: ValueModel, config: TrainConfig, dtype: torch.dtype) -> None:
        self.model = model
        self._forward = PolicyForward(
            model.body,
            dtype=dtype,
            shared_prompt=config.shared_prompt,
            head_chunk_tokens=config.head_chunk_tokens,
            activation_checkpointing=config.activation_checkpointing,
            fused_kernels=config.kernels,
        )
        self.device = self._forward.device

    @property
    def layout(self) -> Layout:
        return self._forward.layout

    def __call__(self, samples: Sequence[TokenSample]) -> TokenValues:
        """Differentiable under grad mode."""
        hidden_ND, loss, rows = self._forward.hidden_states(samples)
        return TokenValues(loss.scatter(self.model.head(hidden_ND.float())[:, 0]), rows)

    def release(self) -> None:
        self._forward.release()


def after_last_token(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> TokenSample:
    """A sample whose one loss token is the one *after* the response: its value has seen the whole response."""
    return TokenSample(prompt_ids, [*response_ids, 0], [*[0] * len(response_ids), 1])


def _has_adapters(model: nn.Module) -> bool:
    return not isinstance(model, PreTrainedModel)


def plain_copy(model: nn.Module) -> PreTrainedModel:
    """A transformers model with LoRA merged, every parameter trainable, in evaluation mode."""
    body: Any = copy.deepcopy(model)
    if _has_adapters(body):
        body = body.merge_and_unload()
    return body.requires_grad_(True).eval()

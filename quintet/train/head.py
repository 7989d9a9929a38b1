"""Token log-probabilities and entropies from hidden states, never holding [tokens x vocabulary].

Logits are made for a chunk of rows at a time, in the forward pass and again in the backward pass; the
last chunk's are kept between the two, so that a batch of one chunk computes them once. What is saved
besides is one number per row.

With z = logits after the architecture's own scaling and the temperature T, p = softmax(z):
    log p(y) = z_y - logsumexp(z)          d/dz = 1_y - p
    H = logsumexp(z) - sum p z             d/dz = -p (log p + H)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


@dataclass(frozen=True)
class LogitTransform:
    """What an architecture does to `hidden @ weight.T + bias` before it calls it logits."""

    scale: float = 1.0
    softcap: float | None = None  # z -> c * tanh(z / c)

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> LogitTransform:
        """Cohere multiplies (`logit_scale`), Falcon-H1 too (`lm_head_multiplier`), Granite divides
        (`logits_scaling`), Gemma soft-caps (`final_logit_softcapping`)."""
        text = config.get_text_config()
        scale = getattr(text, "logit_scale", None) or 1.0
        scale *= getattr(text, "lm_head_multiplier", None) or 1.0
        scale /= getattr(text, "logits_scaling", None) or 1.0
        return cls(scale, getattr(text, "final_logit_softcapping", None))


@dataclass(frozen=True)
class HeadConfig:
    """Temperature of the policy, rows per chunk, dtype of the matrix products."""

    temperature: float
    chunk_tokens: int
    dtype: torch.dtype
    transform: LogitTransform


def token_logprobs(hidden_ND: Tensor, head: nn.Linear, target_N: Tensor, config: HeadConfig) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row's distribution, float32 [N] each, differentiable."""
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return _ChunkedHead.apply(hidden_ND, head.weight, head.bias, target_N, config)


def logprobs_from_logits(logits_NV: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same from full logits, for a head that is not a linear map of the hidden state."""
    logp_NV = (logits_NV.float() / temperature).log_softmax(dim=-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(dim=-1)


class _ChunkedHead(torch.autograd.Function):
    """(hidden [N, D], weight [V, D], bias [V] | None, target [N]) -> (logprobs [N], entropy [N])."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, config: HeadConfig
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VD.to(config.dtype)
        logprobs_N, lse_N, entropy_N = (hidden_ND.new_empty(len(target_N), dtype=torch.float32) for _ in range(3))
        z_CV = hidden_ND.new_empty(0)
        for rows in _chunks(len(target_N), config.chunk_tokens):
            del z_CV  # before the next chunk is made, so that one exists at a time
            z_CV = _logits(hidden_ND[rows], weight, bias_V, config)
            lse_N[rows] = z_CV.logsumexp(dim=-1)
            logprobs_N[rows] = z_CV.gather(1, target_N[rows, None])[:, 0] - lse_N[rows]
            p_CV = z_CV.sub(lse_N[rows, None]).exp_()
            entropy_N[rows] = lse_N[rows] - torch.linalg.vecdot(p_CV, z_CV)
            del p_CV
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N, z_CV)
        ctx.config = config
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logp_N, grad_entropy_N = grads
        hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N, kept_CV = ctx.saved_tensors
        if grad_logp_N is None and grad_entropy_N is None:
            return None, None, None, None, None
        config: HeadConfig = ctx.config
        weight = weight_VD.to(config.dtype)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        d_weight_VD = torch.zeros_like(weight_VD) if wants_weight else None
        d_bias_V = torch.zeros_like(bias_V) if wants_bias else None
        chunks = _chunks(len(target_N), config.chunk_tokens)
        for rows in reversed(chunks):
            z_CV = kept_CV if rows == chunks[-1] else _logits(hidden_ND[rows], weight, bias_V, config)
            at_rows = _Rows(lse_N, entropy_N, target_N, grad_logp_N, grad_entropy_N).take(rows)
            dz_CV = _grad_logits(z_CV, at_rows, config).to(config.dtype)
            if d_hidden_ND is not None:
                d_hidden_ND[rows] = (dz_CV @ weight).to(d_hidden_ND.dtype)
            if d_weight_VD is not None:
                d_weight_VD += dz_CV.t() @ hidden_ND[rows].to(config.dtype)
            if d_bias_V is not None:
                d_bias_V += dz_CV.sum(dim=0)
        return d_hidden_ND, d_weight_VD, d_bias_V, None, None


def _chunks(n_rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, n_rows)) for start in range(0, n_rows, chunk)]


class _Rows(NamedTuple):
    """What the backward pass knows of each row beside its logits: [N] each."""

    lse: Tensor
    entropy: Tensor
    target: Tensor
    grad_logp: Tensor | None
    grad_entropy: Tensor | None

    def take(self, rows: slice) -> _Rows:
        return _Rows(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, config: HeadConfig) -> Tensor:
    """Scaled, capped and tempered logits, float32 [C, V]."""
    z_CV = (hidden_CD.to(config.dtype) @ weight_VD.t()).float()
    if bias_V is not None:
        z_CV += bias_V
    if config.transform.scale != 1.0:
        z_CV *= config.transform.scale
    if config.transform.softcap is not None:
        z_CV.div_(config.transform.softcap).tanh_().mul_(config.transform.softcap)
    if config.temperature != 1.0:
        z_CV /= config.temperature
    return z_CV


def _grad_logits(z_CV: Tensor, rows: _Rows, config: HeadConfig) -> Tensor:
    """d(loss)/d(hidden @ weight.T + bias), float32 [C, V]."""
    logp_CV = z_CV - rows.lse[:, None]
    weight_CV = torch.zeros_like(rows.lse)[:, None] if rows.grad_logp is None else rows.grad_logp[:, None]
    p_CV = logp_CV.exp()
    if rows.grad_entropy is not None:
        weight_CV = logp_CV.add_(rows.entropy[:, None]).mul_(rows.grad_entropy[:, None]).add_(weight_CV)
    dz_CV = p_CV.mul_(weight_CV).neg_()
    if rows.grad_logp is not None:
        dz_CV.scatter_add_(1, rows.target[:, None], rows.grad_logp[:, None])
    if config.transform.softcap is not None:  # d tanh = 1 - tanh^2, tanh recovered from z
        tanh_CV = z_CV * (config.temperature / config.transform.softcap)
        dz_CV.mul_(1.0 - tanh_CV.square_())
    return dz_CV.mul_(config.transform.scale / config.temperature)

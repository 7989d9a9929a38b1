"""Token log-probabilities and entropies from hidden states, never holding [tokens x vocabulary].

Logits are made for a chunk of rows at a time, in the forward pass and again in the backward pass; the
last chunk's are kept between the two, so that a batch of one chunk computes them once. What is saved
besides is one number per row.

With z = logits after the architecture's own scaling and the temperature T, p = softmax(z):
    log p(y) = z_y - logsumexp(z)          d/dz = 1_y - p
    H = logsumexp(z) - sum p z             d/dz = -p (log p + H)
and with q the reference's softmax, which has no gradient
    KL(p || q) = sum p (log p - log q)     d/dz = p (log p - log q - KL)
    KL(q || p) = sum q (log q - log p)     d/dz = p - q
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from quintet.models.decoder.mass import block_sums, log_share
from quintet.models.decoder.numerics import Kernels
from quintet.train.native.library import Library
from quintet.train.workspace import Gradients, Lease, WorkspacePool

_CACHED_LOGITS = 1 << 20  # float32 numbers that two cores' caches hold


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
    kernels: Kernels | None = None  # None: torch's own product


class HeadWeights(NamedTuple):
    """What `nn.Linear` has, for a head that is no module."""

    weight: Tensor  # [V, D]
    bias: Tensor | None


Head = nn.Linear | HeadWeights


class HeadMemory(NamedTuple):
    """Where logits and the weight's gradient lie on the CPU; the gradient is then added to `.grad` at once. `native`:
    kernels for the softmax."""

    gradients: Gradients
    pool: WorkspacePool
    native: Library | None = None


def token_logprobs(
    hidden_ND: Tensor, head: Head, target_N: Tensor, config: HeadConfig, memory: HeadMemory | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row's distribution, float32 [N] each, differentiable."""
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return _ChunkedHead.apply(hidden_ND, head.weight, head.bias, target_N, config, memory)


def logprobs_from_logits(logits_NV: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same from full logits, for a head that is not a linear map of the hidden state."""
    logp_NV = (logits_NV.float() / temperature).log_softmax(dim=-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(dim=-1)


class _ChunkedHead(torch.autograd.Function):
    """(hidden [N, D], weight [V, D], bias [V] | None, target [N]) -> (logprobs [N], entropy [N])."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        config: HeadConfig,
        memory: HeadMemory | None,
    ) -> tuple[Tensor, Tensor]:
        lease = None if memory is None else memory.pool.lease()
        head = _Head(hidden_ND, weight_VD, bias_V, config)
        logprobs_N, lse_N, entropy_N = (hidden_ND.new_empty(len(target_N), dtype=torch.float32) for _ in range(3))
        chunks = _chunks(len(target_N), config.chunk_tokens)
        product_CV = _chunk_memory(head, lease)
        softmax = _softmax(head, memory)
        for rows in chunks:
            head.product(rows, product_CV)
            softmax.statistics(product_CV, target_N[rows], lse_N[rows], logprobs_N[rows], entropy_N[rows])
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N, product_CV)
        ctx.head_weight, ctx.config, ctx.memory, ctx.lease = head.weight_VD, config, memory, lease
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logp_N, grad_entropy_N = grads
        hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N, product_CV = ctx.saved_tensors
        if grad_logp_N is None and grad_entropy_N is None:
            return (None,) * 6
        config: HeadConfig = ctx.config
        head = _Head(hidden_ND, ctx.head_weight, bias_V, config)
        gradient = _HeadGradient(head, ctx.needs_input_grad, weight_VD, ctx.memory)
        chunks = _chunks(len(target_N), config.chunk_tokens)
        every = _Rows(lse_N, entropy_N, target_N, grad_logp_N, grad_entropy_N)
        softmax = _softmax(head, ctx.memory)
        for rows in reversed(chunks):
            if rows != chunks[-1]:  # the last chunk's are still there
                head.product(rows, product_CV)
            softmax.gradient(product_CV, every.take(rows))
            gradient.add(rows, product_CV[: rows.stop - rows.start])
        if ctx.lease is not None:
            ctx.lease.release()
        return gradient.hidden_ND, gradient.weight_VD, gradient.bias_V, None, None, None


class _TorchSoftmax:
    """Over the first rows of a chunk of products. On a CPU they are passed over some at a time, as many as stay in its
    cache."""

    def __init__(self, head: _Head) -> None:
        self._head = head

    def statistics(
        self, product_CV: Tensor, target_R: Tensor, lse_R: Tensor, logprobs_R: Tensor, entropy_R: Tensor
    ) -> None:
        """Fills log-sum-exps, log-probabilities of the targets and entropies."""
        for part in self._parts(len(target_R), product_CV):
            z_PV = self._head.transformed(product_CV[part])
            lse_R[part], logprobs_R[part], entropy_R[part] = _statistics(z_PV, target_R[part])

    def gradient(self, product_CV: Tensor, rows: _Rows) -> None:
        """d(loss)/d(product) in the place of the product."""
        for part in self._parts(len(rows.target), product_CV):
            z_PV = self._head.transformed(product_CV[part])
            product_CV[part] = _through_transform(_grad_logits(z_PV, rows.take(part)), z_PV, self._head.config)

    @staticmethod
    def _parts(count: int, product_CV: Tensor) -> list[slice]:
        step = max(1, _CACHED_LOGITS // product_CV.shape[1]) if product_CV.device.type == "cpu" else max(1, count)
        return _chunks(count, step)


class _NativeSoftmax:
    """The same in one pass each."""

    def __init__(self, head: _Head, native: Library) -> None:
        self._native, self._factor = native, head.config.transform.scale / head.config.temperature

    def statistics(
        self, product_CV: Tensor, target_R: Tensor, lse_R: Tensor, logprobs_R: Tensor, entropy_R: Tensor
    ) -> None:
        outputs = (lse_R, logprobs_R, entropy_R)
        self._call("head_statistics", product_CV, target_R.contiguous(), *outputs)

    def gradient(self, product_CV: Tensor, rows: _Rows) -> None:
        inputs = (rows.target, rows.lse, rows.entropy, rows.grad_logp, rows.grad_entropy)
        self._call("head_gradient", product_CV, *(None if x is None else x.contiguous() for x in inputs))

    def _call(self, name: str, product_CV: Tensor, *per_row: Tensor | None) -> None:
        assert per_row[0] is not None
        shape = (len(per_row[0]), product_CV.shape[1])
        self._native.call(name, product_CV.dtype, *shape, product_CV, self._factor, *per_row)


def _softmax(head: _Head, memory: HeadMemory | None) -> _TorchSoftmax | _NativeSoftmax:
    """The kernels know neither biases nor soft caps, nor the reproducible engine's order of sums."""
    config = head.config
    plain = head.bias_V is None and config.transform.softcap is None and config.kernels is None
    if plain and memory is not None and memory.native is not None:
        return _NativeSoftmax(head, memory.native)
    return _TorchSoftmax(head)


def _chunk_memory(head: _Head, lease: Lease | None) -> Tensor:
    """Uninitialised [rows of a chunk, V] in the compute dtype."""
    hidden_ND, config = head.hidden_ND, head.config
    shape = (min(config.chunk_tokens, len(hidden_ND)), len(head.weight_VD))
    if lease is not None:
        return lease.workspace.empty(shape, config.dtype)
    return hidden_ND.new_empty(shape, dtype=config.dtype)


def _statistics(z_PV: Tensor, target_P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, log-probability of the target, entropy; overwrites `z_PV`."""
    top_P = z_PV.amax(dim=-1)
    z_PV.sub_(top_P[:, None])
    chosen_P = z_PV.gather(1, target_P[:, None])[:, 0]
    mass_PV = z_PV.exp()
    cumulative_PN = block_sums(mass_PV).cumsum(-1)
    log_sum_P = cumulative_PN[:, -1].log().float()
    entropy_P = log_sum_P - torch.linalg.vecdot(mass_PV, z_PV) / cumulative_PN[:, -1].float()
    return top_P + log_sum_P, log_share(chosen_P, cumulative_PN), entropy_P


def distribution_kl(
    hidden_ND: Tensor,
    head: Head,
    ref_hidden_ND: Tensor,
    ref_head: Head,
    config: HeadConfig,
    *,
    direction: str,
) -> Tensor:
    """KL between each row's whole distribution and the reference's, float32 [N], nats, differentiable in the policy.

    `direction` reverse is KL(policy || reference), forward KL(reference || policy); both at the policy's temperature.
    """
    with torch.autocast(hidden_ND.device.type, enabled=False):
        inputs = (hidden_ND, head.weight, head.bias, ref_hidden_ND, ref_head.weight, ref_head.bias)
        return _ChunkedKl.apply(*inputs, config, direction == "reverse")


def _policy_and_reference(tensors: Sequence[Tensor], config: HeadConfig) -> tuple[_Head, _Head]:
    hidden_ND, weight_VD, bias_V, ref_hidden_ND, ref_weight_VD, ref_bias_V = tensors
    return _Head(hidden_ND, weight_VD, bias_V, config), _Head(ref_hidden_ND, ref_weight_VD, ref_bias_V, config)


class _ChunkedKl(torch.autograd.Function):
    """Hidden [N, D], weight [V, D] and bias [V] | None of the policy and of the reference -> KL [N]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, config, is_reverse = inputs
        policy, reference = _policy_and_reference(tensors, config)
        kl_N = policy.hidden_ND.new_empty(len(policy.hidden_ND), dtype=torch.float32)
        for rows in _chunks(len(kl_N), config.chunk_tokens):
            logp_CV, logq_CV = policy.logits(rows).log_softmax(-1), reference.logits(rows).log_softmax(-1)
            first, second = (logp_CV, logq_CV) if is_reverse else (logq_CV, logp_CV)
            kl_N[rows] = torch.linalg.vecdot(first.exp(), first - second)
        ctx.save_for_backward(*tensors, kl_N)
        ctx.config, ctx.is_reverse = config, is_reverse
        return kl_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_N,) = grads
        *tensors, kl_N = ctx.saved_tensors
        policy, reference = _policy_and_reference(tensors, ctx.config)
        gradient = _HeadGradient(policy, ctx.needs_input_grad, tensors[1])
        for rows in _chunks(len(kl_N), ctx.config.chunk_tokens):
            z_CV = policy.logits(rows)
            logp_CV, logq_CV = z_CV.log_softmax(-1), reference.logits(rows).log_softmax(-1)
            p_CV = logp_CV.exp()
            dz_CV = p_CV * (logp_CV - logq_CV - kl_N[rows, None]) if ctx.is_reverse else p_CV - logq_CV.exp()
            gradient.add(rows, _through_transform(dz_CV.mul_(grad_N[rows, None]), z_CV, ctx.config))
        return gradient.hidden_ND, gradient.weight_VD, gradient.bias_V, None, None, None, None, None


class _Head:
    """Rows of hidden states and the linear head over them."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, config: HeadConfig) -> None:
        self.hidden_ND, self.bias_V, self.config = hidden_ND, bias_V, config
        self.weight_VD = weight_VD.to(config.dtype)

    def product(self, rows: slice, out_CV: Tensor) -> None:
        """The first rows of `out_CV` = hidden @ weight.T, in the compute dtype."""
        hidden_CD, kernels = self.hidden_ND[rows].to(self.config.dtype), self.config.kernels
        if kernels is None:
            torch.mm(hidden_CD, self.weight_VD.t(), out=out_CV[: len(hidden_CD)])
        else:
            padded_CD = F.pad(hidden_CD, (0, 0, 0, -len(hidden_CD) % kernels.row_tile))
            out_CV[: len(hidden_CD)] = kernels.linear(padded_CD, self.weight_VD, None)[: len(hidden_CD)]

    def transformed(self, product_CV: Tensor) -> Tensor:
        """New float32 logits [C, V]: biased, scaled, capped and tempered."""
        return _transform(product_CV.to(torch.float32, copy=True), self.bias_V, self.config)

    def logits(self, rows: slice) -> Tensor:
        out_CV = self.weight_VD.new_empty(rows.stop - rows.start, len(self.weight_VD))
        self.product(rows, out_CV)
        return _transform(out_CV.float(), self.bias_V, self.config)


class _HeadGradient:
    """Gradients of hidden states, weight and bias, summed over chunks; None where none is wanted, and for the weight
    where `memory` takes it."""

    def __init__(
        self, head: _Head, wanted: Sequence[bool], parameter_VD: Tensor, memory: HeadMemory | None = None
    ) -> None:
        self._head, self._parameter_VD = head, parameter_VD
        self._memory = memory if wanted[1] else None
        self.hidden_ND = torch.empty_like(head.hidden_ND) if wanted[0] else None
        own = wanted[1] and memory is None
        self.weight_VD = torch.zeros_like(parameter_VD, dtype=torch.float32) if own else None
        self.bias_V = torch.zeros_like(head.bias_V) if wanted[2] and head.bias_V is not None else None

    def add(self, rows: slice, dz_CV: Tensor) -> None:
        """`dz_CV`: d(loss)/d(hidden @ weight.T + bias) of these rows."""
        dtype, hidden_ND = self._head.config.dtype, self._head.hidden_ND
        dz_CV = dz_CV.to(dtype)
        if self.hidden_ND is not None:
            self.hidden_ND[rows] = (dz_CV @ self._head.weight_VD).to(self.hidden_ND.dtype)
        hidden_CD = hidden_ND[rows].to(dtype)
        if self.weight_VD is not None:
            self.weight_VD += dz_CV.t() @ hidden_CD
        if self._memory is not None:
            gradients = self._memory.gradients
            gradients.add(self._parameter_VD, gradients.product(dz_CV.t(), hidden_CD))
        if self.bias_V is not None:
            self.bias_V += dz_CV.sum(dim=0)


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


def _transform(z_CV: Tensor, bias_V: Tensor | None, config: HeadConfig) -> Tensor:
    """hidden @ weight.T -> scaled, capped and tempered logits, in place."""
    if bias_V is not None:
        z_CV += bias_V
    if config.transform.scale != 1.0:
        z_CV *= config.transform.scale
    if config.transform.softcap is not None:
        z_CV.div_(config.transform.softcap).tanh_().mul_(config.transform.softcap)
    if config.temperature != 1.0:
        z_CV /= config.temperature
    return z_CV


def _grad_logits(z_CV: Tensor, rows: _Rows) -> Tensor:
    """d(loss)/dz, float32 [C, V]."""
    logp_CV = z_CV - rows.lse[:, None]
    weight_CV = torch.zeros_like(rows.lse)[:, None] if rows.grad_logp is None else rows.grad_logp[:, None]
    p_CV = logp_CV.exp()
    if rows.grad_entropy is not None:
        weight_CV = logp_CV.add_(rows.entropy[:, None]).mul_(rows.grad_entropy[:, None]).add_(weight_CV)
    dz_CV = p_CV.mul_(weight_CV).neg_()
    if rows.grad_logp is not None:
        dz_CV.scatter_add_(1, rows.target[:, None], rows.grad_logp[:, None])
    return dz_CV


def _through_transform(dz_CV: Tensor, z_CV: Tensor, config: HeadConfig) -> Tensor:
    """d(loss)/dz -> d(loss)/d(hidden @ weight.T + bias), in place."""
    if config.transform.softcap is not None:  # d tanh = 1 - tanh^2, tanh recovered from z
        tanh_CV = z_CV * (config.temperature / config.transform.softcap)
        dz_CV.mul_(1.0 - tanh_CV.square_())
    return dz_CV.mul_(config.transform.scale / config.temperature)

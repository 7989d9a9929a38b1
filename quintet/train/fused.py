"""A Llama-style decoder over a packed row, forward and backward by hand, for the CPU.

transformers' layers under autograd pass over memory some hundred times per layer; on a small model that takes longer
than the matrix products. Here a layer is written out: products in the compute dtype, residuals, norms and rotations in
float32, results stored into memory that is used again (`Workspace`), as little as possible kept for the backward pass.
What is computed is the same, and `PolicyForward` compares it with the model's own forward before it is used.

T tokens, E hidden size, H query and J key/value heads of size D, F the feed-forward size. Left out: other
architectures, dropout, other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quintet.models.lora import linear_parts
from quintet.train.fused_attention import Heads
from quintet.train.fused_linear import Linears
from quintet.train.fused_ops import Branch, Ops, TorchOps
from quintet.train.native.library import Library
from quintet.train.native.ops import NativeOps
from quintet.train.packing import PackedRow
from quintet.train.workspace import Gradients, Lease, Workspace, WorkspacePool

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

Take = Callable[[str, Sequence[int], torch.dtype], Tensor]


@dataclass(frozen=True)
class _Run:
    """What the layers share in one call."""

    ops: Ops
    plan: Any
    cos_TD: Tensor
    sin_TD: Tensor
    dtype: torch.dtype
    workspace: Workspace

    def scratch(self, name: str, *shape: int) -> Tensor:
        return self.workspace.scratch(name, shape, self.dtype)

    def scratch32(self, name: str, *shape: int) -> Tensor:
        return self.workspace.scratch(name, shape, torch.float32)


class FusedDecoder:
    """The decoder of `model` (a causal language model, or one inside peft), sharing its parameters.

    The backward pass adds the parameters' gradients to `.grad` by `gradients`. `native`: kernels for what is no matrix
    product.
    """

    def __init__(
        self, model: PreTrainedModel, gradients: Gradients, *, recompute: bool, native: Library | None
    ) -> None:
        decoder: Any = model.get_decoder()
        self._decoder, self._recompute, self._native = decoder, recompute, native
        self._gradients, weights = gradients, Workspace()
        self._norm = _Norm(decoder.norm, self._gradients)
        self._layers = [_Layer(layer, model.config, self._gradients, weights, native) for layer in decoder.layers]
        self.pool = WorkspacePool()

    def __call__(self, row: PackedRow, dtype: torch.dtype) -> Tensor:
        """Hidden states [N, E] float32 of the rows that predict the N loss tokens; differentiable under grad mode."""
        trained = [p for p in self._decoder.parameters() if p.requires_grad]
        with torch.autocast("cpu", enabled=False):
            return _Decode.apply(self, row, dtype, torch.is_grad_enabled() and bool(trained), *trained)

    def forward(self, row: PackedRow, dtype: torch.dtype, lease: Lease, *, keep: bool) -> tuple[Tensor, list[Tensor]]:
        """The hidden states, and what the backward pass needs: a list per layer, end to end."""
        run = self._run(row, dtype, lease.workspace)
        x_TE = self._take(run, keep)("x", (row.input_ids_1T.numel(), self._norm.width), torch.float32)
        torch.index_select(self._decoder.embed_tokens.weight.detach(), 0, row.input_ids_1T[0], out=x_TE)
        kept: list[Tensor] = []
        for layer in self._layers:
            take = self._take(run, keep and not self._recompute)
            out_TE, saved = layer.forward(x_TE, run, take)
            if keep and self._recompute:
                kept.append(x_TE)
                out_TE = run.workspace.empty(out_TE.shape, torch.float32).copy_(out_TE)
            elif keep:
                kept += saved
            x_TE = out_TE
        x_NE = x_TE[row.loss.source_N]
        hidden_NE, inverse_N = torch.empty_like(x_NE), x_NE.new_empty(len(x_NE))
        self._norm.forward(x_NE, hidden_NE, inverse_N, run)
        return hidden_NE, [*kept, x_NE, inverse_N]

    def backward(
        self, row: PackedRow, dtype: torch.dtype, lease: Lease, kept: Sequence[Tensor], grad_NE: Tensor
    ) -> None:
        run = self._run(row, dtype, lease.workspace)
        *kept, x_NE, inverse_N = kept
        grad_x_NE = torch.zeros_like(x_NE)
        self._norm.backward(grad_NE.contiguous(), x_NE, inverse_N, grad_x_NE, run)
        n_tokens = row.input_ids_1T.numel()
        grad_TE = run.scratch32("grad_x", n_tokens, self._norm.width).zero_()
        grad_TE.index_add_(0, row.loss.source_N, grad_x_NE)
        low_TE = run.scratch("grad_low", *grad_TE.shape).copy_(grad_TE)
        per_layer = len(kept) // max(1, len(self._layers))
        for index in reversed(range(len(self._layers))):
            saved = kept[index * per_layer : (index + 1) * per_layer]
            if self._recompute:
                _, saved = self._layers[index].forward(saved[0], run, self._take(run, keep=False))
            self._layers[index].backward(saved, grad_TE, low_TE, run)
        embedding = self._decoder.embed_tokens.weight
        if embedding.requires_grad:
            self._gradients.add_rows(embedding, row.input_ids_1T[0], grad_TE)

    def _run(self, row: PackedRow, dtype: torch.dtype, workspace: Workspace) -> _Run:
        like = self._decoder.embed_tokens.weight.detach()[:1]
        cos, sin = self._decoder.rotary_emb(like.float(), row.position_ids_1T)
        ops: Ops = TorchOps(workspace)
        if self._native is not None:
            ops = NativeOps(self._native, workspace)
        return _Run(ops, ops.plan(row), cos[0].contiguous(), sin[0].contiguous(), dtype, workspace)

    @staticmethod
    def _take(run: _Run, keep: bool) -> Take:
        workspace = run.workspace
        return (lambda name, shape, dtype: workspace.empty(shape, dtype)) if keep else workspace.scratch


class _Decode(torch.autograd.Function):
    """Gradients of the parameters are added to `.grad` by the backward pass, which returns none."""

    @staticmethod
    def forward(ctx: Any, decoder: FusedDecoder, row: PackedRow, dtype: torch.dtype, keep: bool, *_: Tensor) -> Tensor:
        lease = decoder.pool.lease()
        hidden_NE, kept = decoder.forward(row, dtype, lease, keep=keep)
        if keep:
            ctx.save_for_backward(*kept)
            ctx.decoder, ctx.row, ctx.dtype, ctx.lease = decoder, row, dtype, lease
        else:
            lease.release()
        return hidden_NE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        if not ctx.lease.release.alive:
            raise RuntimeError("the fused decoder's activations are used up by one backward pass; run forward again")
        ctx.decoder.backward(ctx.row, ctx.dtype, ctx.lease, ctx.saved_tensors, grads[0])
        ctx.lease.release()
        return (None,) * len(ctx.needs_input_grad)


class _Norm:
    """An RMS norm over the last axis."""

    def __init__(self, module: nn.Module, gradients: Gradients) -> None:
        norm: Any = module
        self._weight, self._eps, self._gradients = norm.weight, norm.variance_epsilon, gradients
        self.width = len(norm.weight)

    def forward(self, x_TE: Tensor, out_TE: Tensor, inverse_T: Tensor, run: _Run, branch: Branch = None) -> Tensor:
        run.ops.norm(x_TE, self._weight.detach(), self._eps, out_TE, inverse_T, branch)
        return out_TE

    def again(self, x_TE: Tensor, out_TE: Tensor, inverse_T: Tensor, run: _Run) -> Tensor:
        run.ops.norm_again(x_TE, self._weight.detach(), inverse_T, out_TE)
        return out_TE

    def backward(
        self,
        grad_out_TE: Tensor,
        x_TE: Tensor,
        inverse_T: Tensor,
        grad_TE: Tensor,
        run: _Run,
        low_TE: Tensor | None = None,
    ) -> None:
        """Adds d(loss)/dx to `grad_TE`; `low_TE` becomes its copy."""
        inputs, wanted = (grad_out_TE, x_TE, self._weight.detach(), inverse_T), self._weight.requires_grad
        grad_E = run.ops.norm_backward(*inputs, grad_TE, low_TE=low_TE, of_weight=wanted)
        if grad_E is not None:
            self._gradients.add(self._weight, grad_E)


class _Layer:
    """Attention and feed-forward block of one layer."""

    def __init__(
        self, module: nn.Module, config: Any, gradients: Gradients, weights: Workspace, native: Library | None
    ) -> None:
        layer: Any = module
        attn, mlp = layer.self_attn, layer.mlp
        size = attn.head_dim
        self._heads = Heads(config.num_attention_heads, config.num_key_value_heads, size, attn.scaling)
        self._rotated = self._heads.queries + self._heads.keys
        self._norms = [_Norm(n, gradients) for n in (layer.input_layernorm, layer.post_attention_layernorm)]
        self._head_norms = [_Norm(getattr(attn, f"{n}_norm"), gradients) for n in "qk"] if _has_head_norms(attn) else []

        def linears(*modules: nn.Module) -> Linears:
            return Linears(modules, gradients, weights, native)

        self._qkv = linears(attn.q_proj, attn.k_proj, attn.v_proj)
        self._output = linears(attn.o_proj)
        self._gate_up = linears(mlp.gate_proj, mlp.up_proj)
        self._down = linears(mlp.down_proj)

    def forward(self, x_TE: Tensor, run: _Run, take: Take) -> tuple[Tensor, list[Tensor]]:
        """The next layer's input, and what `backward` needs."""
        n, ops, (first, second) = len(x_TE), run.ops, self._norms
        inverse_T, inverse2_T = (take(name, (n,), torch.float32) for name in ("inverse", "inverse2"))
        normed_TE = first.forward(x_TE, run.scratch("normed_low", *x_TE.shape), inverse_T, run)
        qkv_TC = self._qkv.forward(normed_TE, take("qkv", (n, self._qkv.width), run.dtype))
        saved_heads = self._normalise_heads(qkv_TC, run, take)
        ops.rotate(qkv_TC, self._rotated, run.cos_TD, run.sin_TD)
        attended_TC = take("attended", (n, self._heads.queries * self._heads.size), run.dtype)
        lse_TH = take("lse", (n, self._heads.queries), torch.float32)
        ops.attention(qkv_TC, self._heads, run.plan, attended_TC, lse_TH)
        branch_TE = self._output.forward(attended_TC, run.scratch("branch", *x_TE.shape))
        x2_TE = take("x2", x_TE.shape, torch.float32)
        normed_low_TE = run.scratch("normed_low", *x_TE.shape)
        normed_TE = second.forward(x_TE, normed_low_TE, inverse2_T, run, (branch_TE, x2_TE))
        gate_up_TF = self._gate_up.forward(normed_TE, take("gate_up", (n, self._gate_up.width), run.dtype))
        inner_TF = run.scratch("inner", n, self._gate_up.width // 2)
        ops.swiglu(gate_up_TF, inner_TF)
        branch_TE = self._down.forward(inner_TF, run.scratch("branch", *x_TE.shape))
        out_TE = take("x", x_TE.shape, torch.float32)
        ops.add(x2_TE, branch_TE, out_TE)
        return out_TE, [x_TE, inverse_T, qkv_TC, attended_TC, lse_TH, x2_TE, inverse2_T, gate_up_TF, *saved_heads]

    def backward(self, saved: Sequence[Tensor], grad_TE: Tensor, low_TE: Tensor, run: _Run) -> None:
        """`grad_TE`, and `low_TE` in the compute dtype: d(loss)/d(output), turned into d(loss)/d(input) in place."""
        x_TE, inverse_T, qkv_TC, attended_TC, lse_TH, x2_TE, inverse2_T, gate_up_TF, *saved_heads = saved
        ops, (first, second) = run.ops, self._norms
        inner_TF = run.scratch("inner", len(x_TE), self._gate_up.width // 2)
        ops.swiglu(gate_up_TF, inner_TF)
        grad_inner_TF = self._down.backward(inner_TF, low_TE, run.scratch("grad_inner", *inner_TF.shape))
        grad_gate_up_TF = run.scratch("grad_gate_up", *gate_up_TF.shape)
        ops.swiglu_backward(grad_inner_TF, gate_up_TF, grad_gate_up_TF)
        normed_TE = second.again(x2_TE, run.scratch("normed_low", *x_TE.shape), inverse2_T, run)
        self._gate_up.backward(normed_TE, grad_gate_up_TF, low_TE)
        second.backward(low_TE, x2_TE, inverse2_T, grad_TE, run, low_TE)
        grad_attended_TC = self._output.backward(attended_TC, low_TE, run.scratch("grad_attended", *attended_TC.shape))
        grad_qkv_TC = run.scratch("grad_qkv", *qkv_TC.shape)
        ops.attention_backward(grad_attended_TC, qkv_TC, self._heads, run.plan, attended_TC, lse_TH, grad_qkv_TC)
        ops.rotate(grad_qkv_TC, self._rotated, run.cos_TD, run.sin_TD, back=True)
        self._normalise_heads_backward(grad_qkv_TC, saved_heads, run)
        normed_TE = first.again(x_TE, run.scratch("normed_low", *x_TE.shape), inverse_T, run)
        self._qkv.backward(normed_TE, grad_qkv_TC, low_TE)
        first.backward(low_TE, x_TE, inverse_T, grad_TE, run, low_TE)

    def _split_heads(self, qkv_TC: Tensor) -> Sequence[Tensor]:
        """Queries [T, H, D] and keys [T, J, D], views."""
        heads = self._heads
        return (
            qkv_TC[:, : self._rotated * heads.size]
            .unflatten(1, (self._rotated, heads.size))
            .split([heads.queries, heads.keys], dim=1)
        )

    def _normalise_heads(self, qkv_TC: Tensor, run: _Run, take: Take) -> list[Tensor]:
        """Qwen3 norms each head of queries and keys. In place; returns what went in and 1 / rms, for each."""
        saved: list[Tensor] = []
        for index, norm in enumerate(self._head_norms):
            states = self._split_heads(qkv_TC)[index]
            before_MD = take(f"head{index}", (states.shape[0] * states.shape[1], self._heads.size), torch.float32)
            before_MD.view(states.shape).copy_(states)
            inverse_M = take(f"head_inverse{index}", (len(before_MD),), torch.float32)
            out_MD = norm.forward(before_MD, run.scratch32("head_normed", *before_MD.shape), inverse_M, run)
            states.copy_(out_MD.view(states.shape))
            saved += [before_MD, inverse_M]
        return saved

    def _normalise_heads_backward(self, grad_qkv_TC: Tensor, saved: Sequence[Tensor], run: _Run) -> None:
        for index, norm in enumerate(self._head_norms):
            before_MD, inverse_M = saved[2 * index : 2 * index + 2]
            grads = self._split_heads(grad_qkv_TC)[index]
            grad_MD = run.scratch32("head_grad", *before_MD.shape).zero_()
            norm.backward(grads.reshape(before_MD.shape), before_MD, inverse_M, grad_MD, run)
            grads.copy_(grad_MD.view(grads.shape))


def supports(model: PreTrainedModel) -> bool:
    """Whether every part of the decoder is one that is written out here."""
    config, decoder = model.config, _decoder(model)
    if config.model_type not in FAMILIES or config.hidden_act != "silu" or model.device.type != "cpu":
        return False
    parameters = list(decoder.parameters())
    if not decoder.layers or any(p.dtype != torch.float32 for p in parameters):
        return False
    linears = [f"self_attn.{side}_proj" for side in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    modules = (layer.get_submodule(name) for layer in decoder.layers for name in linears)
    return all(linear_parts(module) is not None for module in modules)


def _decoder(model: PreTrainedModel) -> Any:
    return model.get_decoder()


def _has_head_norms(attn: nn.Module) -> bool:
    return {"q_norm", "k_norm"} <= {name for name, _ in attn.named_children()}

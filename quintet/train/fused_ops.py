"""What the fused decoder does to each row between its matrix products, and its attention: in plain torch.

`TorchOps` is the form that runs everywhere; `native/ops.py` has the same in C++.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from quintet.train import fused_attention
from quintet.train.fused_attention import Heads
from quintet.train.packing import PackedRow
from quintet.train.workspace import Workspace


class Ops(Protocol):
    """Results go into the tensors that are passed for them. T tokens, E hidden, F feed-forward size; `low` tensors have
    the compute dtype, the others are float32."""

    def norm(
        self, x_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor, inverse_T: Tensor, branch: Branch = None
    ) -> None:
        """`inverse_T` = 1 / rms(x), `out_TE` = x / rms(x) * weight (arXiv 1910.07467). `branch`: a low tensor, and
        where x + branch goes, which then stands for x."""

    def norm_again(self, x_TE: Tensor, weight_E: Tensor, inverse_T: Tensor, out_TE: Tensor) -> None: ...

    def norm_backward(
        self,
        grad_out_TE: Tensor,
        x_TE: Tensor,
        weight_E: Tensor,
        inverse_T: Tensor,
        grad_TE: Tensor,
        *,
        low_TE: Tensor | None = None,
        of_weight: bool,
    ) -> Tensor | None:
        """Adds d(loss)/dx to `grad_TE`, copies that to `low_TE`; returns d(loss)/d(weight) where `of_weight`."""

    def add(self, x_TE: Tensor, low_TE: Tensor, out_TE: Tensor) -> None: ...

    def swiglu(self, gate_up_TF: Tensor, out_TF: Tensor) -> None:
        """SiLU(gate) * up, arXiv 2002.05202; gates stand before ups."""

    def swiglu_backward(self, grad_TF: Tensor, gate_up_TF: Tensor, out_TF: Tensor) -> None:
        """`out_TF` = d(loss)/d(gate, up)."""

    def rotate(self, x_TC: Tensor, heads: int, cos_TD: Tensor, sin_TD: Tensor, *, back: bool = False) -> None:
        """Rotary embedding of halves of the first `heads` heads, in place; `back`: its inverse, which is its gradient
        too. arXiv 2104.09864."""

    def plan(self, row: PackedRow) -> Any:
        """What `attention` needs to know of who attends to whom."""

    def attention(self, qkv_TC: Tensor, heads: Heads, plan: Any, out_TC: Tensor, lse_TH: Tensor) -> None:
        """Causal attention, and the log-sums of its scaled scores."""

    def attention_backward(
        self, grad_TC: Tensor, qkv_TC: Tensor, heads: Heads, plan: Any, out_TC: Tensor, lse_TH: Tensor, to_TC: Tensor
    ) -> None:
        """`to_TC` = d(loss)/d(qkv)."""


Branch = tuple[Tensor, Tensor] | None


class TorchOps:
    """`Ops`, with scratch memory of a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def norm(
        self, x_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor, inverse_T: Tensor, branch: Branch = None
    ) -> None:
        if branch is not None:
            self.add(x_TE, *branch)
            x_TE = branch[1]
        torch.linalg.vecdot(x_TE, x_TE, out=inverse_T)
        inverse_T.div_(len(weight_E)).add_(eps).rsqrt_()
        self.norm_again(x_TE, weight_E, inverse_T, out_TE)

    def norm_again(self, x_TE: Tensor, weight_E: Tensor, inverse_T: Tensor, out_TE: Tensor) -> None:
        normed_TE = torch.mul(x_TE, inverse_T[:, None], out=self._scratch("normed", x_TE))
        out_TE.copy_(normed_TE.mul_(weight_E))

    def norm_backward(
        self,
        grad_out_TE: Tensor,
        x_TE: Tensor,
        weight_E: Tensor,
        inverse_T: Tensor,
        grad_TE: Tensor,
        *,
        low_TE: Tensor | None = None,
        of_weight: bool,
    ) -> Tensor | None:
        """inverse (g w - n mean(g w n)), n = x / rms(x)."""
        normed_TE = torch.mul(x_TE, inverse_T[:, None], out=self._scratch("normed", x_TE))
        g_TE = self._scratch("norm_grad", x_TE).copy_(grad_out_TE)
        product_TE = torch.mul(g_TE, normed_TE, out=self._scratch("norm_product", x_TE))
        mean_T = (product_TE @ weight_E).div_(-len(weight_E))
        g_TE.mul_(weight_E).addcmul_(normed_TE, mean_T[:, None])
        grad_TE.addcmul_(g_TE, inverse_T[:, None])
        if low_TE is not None:
            low_TE.copy_(grad_TE)
        return product_TE.sum(0) if of_weight else None

    def add(self, x_TE: Tensor, low_TE: Tensor, out_TE: Tensor) -> None:
        out_TE.copy_(low_TE).add_(x_TE)

    def swiglu(self, gate_up_TF: Tensor, out_TF: Tensor) -> None:
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=1)
        torch.mul(silu(gate_TF), up_TF, out=out_TF)

    def swiglu_backward(self, grad_TF: Tensor, gate_up_TF: Tensor, out_TF: Tensor) -> None:
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=1)
        grad_gate_TF, grad_up_TF = out_TF.chunk(2, dim=1)
        torch.mul(grad_TF, silu(gate_TF), out=grad_up_TF)
        torch.ops.aten.silu_backward.grad_input(grad_TF * up_TF, gate_TF, grad_input=grad_gate_TF)

    def rotate(self, x_TC: Tensor, heads: int, cos_TD: Tensor, sin_TD: Tensor, *, back: bool = False) -> None:
        size = cos_TD.shape[1]
        half, sign = size // 2, -1.0 if back else 1.0
        x_TXD = x_TC[:, : heads * size].unflatten(1, (heads, size))
        x = self._scratch("rotated_from", x_TXD).copy_(x_TXD)
        out = torch.mul(x, cos_TD[:, None], out=self._scratch("rotated", x_TXD))
        out[..., :half].addcmul_(x[..., half:], sin_TD[:, None, :half], value=-sign)
        out[..., half:].addcmul_(x[..., :half], sin_TD[:, None, half:], value=sign)
        x_TXD.copy_(out)

    def plan(self, row: PackedRow) -> fused_attention.FusedPlan:
        return fused_attention.plan(row.segments, row.input_ids_1T.numel())

    def attention(
        self, qkv_TC: Tensor, heads: Heads, plan: fused_attention.FusedPlan, out_TC: Tensor, lse_TH: Tensor
    ) -> None:
        fused_attention.attention(qkv_TC, heads, plan, out_TC, lse_TH)

    def attention_backward(
        self,
        grad_TC: Tensor,
        qkv_TC: Tensor,
        heads: Heads,
        plan: fused_attention.FusedPlan,
        out_TC: Tensor,
        lse_TH: Tensor,
        to_TC: Tensor,
    ) -> None:
        fused_attention.attention_backward(grad_TC, qkv_TC, heads, plan, out_TC, lse_TH, to_TC)

    def _scratch(self, name: str, like: Tensor) -> Tensor:
        return self._workspace.scratch(name, like.shape, torch.float32)

"""Linear layers of the fused decoder: those that read the same input are one matrix product.

Weights are cast to the compute dtype once per optimizer step, not once per micro-batch, and gradients are added to
`.grad` where they are made: autograd would allocate every one of them anew. LoRA's adapters are added to the weights
then too, W + scale B A in float32 before the cast, as they are for the engine; so a forward pass costs what it costs
without them, and their own products are four narrow ones in the backward pass. C++ kernels do both where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quintet.models.lora import Adapter, LinearParts, linear_parts
from quintet.train.native.adapters import adapters_backward, merge
from quintet.train.native.library import Library
from quintet.train.workspace import Gradients, Workspace


class _Weights(NamedTuple):
    """In the compute dtype: weights with their adapters, and biases, end to end."""

    weight_OI: Tensor
    bias_O: Tensor | None


class Linears:
    """One or more linear layers (plain, or LoRA around a plain one) over the same input, their outputs side by side."""

    def __init__(
        self, modules: Sequence[nn.Module], gradients: Gradients, weights: Workspace, native: Library | None
    ) -> None:
        self._modules, self._native = modules, native
        self._gradients, self._weights = gradients, weights
        self._copies: dict[str, tuple[object, Tensor]] = {}
        self.width = sum(part.base.out_features for part in self._parts())

    def forward(self, x_TI: Tensor, out_TO: Tensor) -> Tensor:
        """`out_TO` = the layers' outputs, side by side."""
        weights = self._weights_in(x_TI.dtype)
        torch.mm(x_TI, weights.weight_OI.t(), out=out_TO)
        if weights.bias_O is not None:
            out_TO += weights.bias_O
        return out_TO

    def backward(self, x_TI: Tensor, grad_TO: Tensor, out_TI: Tensor) -> Tensor:
        """`out_TI` = d(loss)/dx; the weights' gradients go to `.grad`."""
        parts, weights = self._parts(), self._weights_in(x_TI.dtype)
        torch.mm(grad_TO, weights.weight_OI, out=out_TI)
        if any(p.base.weight.requires_grad for p in parts):
            self._add_split([p.base.weight for p in parts], self._gradients.product(grad_TO.t(), x_TI))
        if weights.bias_O is not None:
            self._add_split([p.base.bias for p in parts], grad_TO.sum(0))
        if any(a.up.requires_grad for p in parts for a in p.adapters):
            self._adapters_backward(parts, x_TI, grad_TO)
        return out_TI

    def _adapters_backward(self, parts: Sequence[LinearParts], x_TI: Tensor, grad_TO: Tensor) -> None:
        if self._native is not None:
            placed = [(adapter, rows.start) for adapter, rows, _ in _blocks(parts)]
            return adapters_backward(self._native, x_TI, grad_TO, placed, self._gradients)
        downs = [a.down for p in parts for a in p.adapters]
        down_RI, up_OR = self._joined("down", downs, x_TI.dtype), self._block_diagonal(parts, x_TI.dtype)
        self._add_split(downs, (grad_TO @ up_OR).t() @ x_TI)
        # of the two factors the narrow one is transposed: a wide one takes longer than the product
        self._add_diagonal(parts, ((x_TI @ down_RI.t()).t() @ grad_TO).t())

    def _add_split(self, parameters: Sequence[Tensor], grads: Tensor) -> None:
        """To each parameter its rows of `grads`."""
        for parameter, grad in zip(parameters, grads.split([len(p) for p in parameters]), strict=True):
            if parameter.requires_grad:
                self._gradients.add(parameter, grad)

    def _add_diagonal(self, parts: Sequence[LinearParts], grad_OR: Tensor) -> None:
        for adapter, rows, columns in _blocks(parts):
            if adapter.up.requires_grad:
                self._gradients.add(adapter.up, grad_OR[rows, columns] * adapter.scale)

    def _parts(self) -> list[LinearParts]:
        parts = [linear_parts(module) for module in self._modules]
        return [part for part in parts if part is not None]

    def _weights_in(self, dtype: torch.dtype) -> _Weights:
        parts = self._parts()
        biases = [p.base.bias for p in parts]
        bias_O = None if biases[0] is None else self._joined("bias", biases, dtype)
        if any(p.adapters for p in parts):
            return _Weights(self._merged(parts, dtype), bias_O)
        return _Weights(self._joined("base", [p.base.weight for p in parts], dtype), bias_O)

    def _merged(self, parts: Sequence[LinearParts], dtype: torch.dtype) -> Tensor:
        """The layers' weights with their adapters, end to end."""
        shape = (self.width, parts[0].base.in_features)
        sources = [p.base.weight for p in parts] + [x for p in parts for a in p.adapters for x in (a.down, a.up)]

        def fill(kept: Tensor) -> None:
            for rows, part in zip(kept.split([p.base.out_features for p in parts]), parts, strict=True):
                total_OI = part.base.weight.detach()
                if self._native is not None:
                    merge(self._native, total_OI, part.adapters, rows)
                    continue
                for adapter in part.adapters:
                    factors = (adapter.up.detach().float(), adapter.down.detach().float())
                    scratch_OI = self._weights.scratch("merged", rows.shape, torch.float32)
                    total_OI = torch.addmm(total_OI, *factors, alpha=adapter.scale, out=scratch_OI)
                rows.copy_(total_OI)

        if dtype == torch.float32:  # a copy that is kept would double the weights' memory
            merged_OI = self._weights.scratch("merged_all", shape, dtype)
            fill(merged_OI)
            return merged_OI
        return self._kept("merged", sources, shape, dtype, fill)

    def _joined(self, name: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """`tensors` end to end."""
        if dtype == torch.float32:
            return torch.cat([t.detach() for t in tensors]) if len(tensors) > 1 else tensors[0].detach()

        def fill(kept: Tensor) -> None:
            for rows, tensor in zip(kept.split([len(t) for t in tensors]), tensors, strict=True):
                rows.copy_(tensor.detach())

        return self._kept(name, tensors, (sum(len(t) for t in tensors), *tensors[0].shape[1:]), dtype, fill)

    def _block_diagonal(self, parts: Sequence[LinearParts], dtype: torch.dtype) -> Tensor:
        """[all outputs, all ranks]: each adapter's scaled `up` in the rows of its layer, zeros elsewhere."""
        ups = [a.up for p in parts for a in p.adapters]

        def fill(kept: Tensor) -> None:
            kept.zero_()
            for adapter, rows, columns in _blocks(parts):
                kept[rows, columns] = adapter.up.detach() * adapter.scale

        return self._kept("up", ups, (self.width, sum(up.shape[1] for up in ups)), dtype, fill)

    def _kept(
        self,
        name: str,
        sources: Sequence[Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        fill: Callable[[Tensor], None],
    ) -> Tensor:
        """A tensor made from `sources`, made again where one of them has changed."""
        stamp = (dtype, [(t.data_ptr(), t._version) for t in sources])
        known, kept = self._copies.get(name, (None, None))
        if kept is None or known != stamp:
            if kept is None or kept.shape != shape or kept.dtype != dtype:
                kept = self._weights.empty(shape, dtype)
            fill(kept)
            self._copies[name] = (stamp, kept)
        return kept


def _blocks(parts: Sequence[LinearParts]) -> Iterator[tuple[Adapter, slice, slice]]:
    """Each adapter's rows and columns in the block-diagonal matrix of all."""
    row = column = 0
    for part in parts:
        for adapter in part.adapters:
            rank = len(adapter.down)
            yield adapter, slice(row, row + part.base.out_features), slice(column, column + rank)
            column += rank
        row += part.base.out_features

"""Memory of the fused forward and backward passes that is used again for every micro-batch.

A fresh tensor of megabytes costs a page fault every 4 KiB (1.4 us each where this was measured: more than the product
that fills it), so activations, gradients and low-precision weights lie in slabs of 2 MiB pages that stay.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from quintet.models.memory import huge_pages

_SLAB_BYTES = 64 << 20
_ALIGNMENT = 64


class Workspace:
    """Hands out uninitialised CPU tensors from its slabs, one after the other; `rewind` makes all of it free again.

    Whoever rewinds knows that no tensor from before is read any more.
    """

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._slab = self._offset = 0
        self._scratch: dict[str, Tensor] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        n_bytes = math.prod(shape) * dtype.itemsize
        while self._slab < len(self._slabs) and self._offset + n_bytes > len(self._slabs[self._slab]):
            self._slab, self._offset = self._slab + 1, 0
        if self._slab == len(self._slabs):
            self._slabs.append(huge_pages(max(_SLAB_BYTES, n_bytes)))
        taken = self._slabs[self._slab][self._offset : self._offset + n_bytes]
        self._offset += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken.view(dtype).view(*shape)

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One tensor per name, the same memory at every call: valid until the name is asked for again."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if name not in self._scratch or len(self._scratch[name]) < n_bytes:
            self._scratch[name] = huge_pages(n_bytes)
        return self._scratch[name][:n_bytes].view(dtype).view(*shape)

    def rewind(self) -> None:
        self._slab = self._offset = 0


class Lease:
    """A workspace in use: given back by `release`, or when nothing refers to the lease any more."""

    def __init__(self, workspace: Workspace, free: list[Workspace]) -> None:
        self.workspace = workspace
        self.release = weakref.finalize(self, free.append, workspace)


class WorkspacePool:
    """Workspaces for graphs: one in ordinary use, more where several graphs wait for their backward pass."""

    def __init__(self) -> None:
        self._free: list[Workspace] = []

    def lease(self) -> Lease:
        workspace = self._free.pop() if self._free else Workspace()
        workspace.rewind()
        return Lease(workspace, self._free)


class Gradients:
    """Adds to `.grad`, in memory that is kept when the optimizer sets `.grad` to None."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self._kept: dict[int, Tensor] = {}

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """`left @ right`, valid until the next call."""
        return torch.mm(left, right, out=self._workspace.scratch("product", (len(left), right.shape[1]), left.dtype))

    def add(self, parameter: Tensor, value: Tensor) -> None:
        """`value` may have a lower precision than the parameter."""
        if parameter.grad is None:
            parameter.grad = self._memory(parameter).copy_(value)
        else:
            parameter.grad += value

    def add_rows(self, parameter: Tensor, rows_T: Tensor, values_TD: Tensor) -> None:
        """To row `rows_T[t]` of a matrix, `values_TD[t]`."""
        self.begun(parameter).index_add_(0, rows_T, values_TD)

    def begun(self, parameter: Tensor) -> Tensor:
        """`.grad` for others to add to; zeros where there was none."""
        if parameter.grad is None:
            parameter.grad = self._memory(parameter).zero_()
        return parameter.grad

    def _memory(self, parameter: Tensor) -> Tensor:
        kept = self._kept.get(id(parameter))
        if kept is None:
            kept = self._kept[id(parameter)] = self._workspace.empty(parameter.shape, parameter.dtype)
        return kept

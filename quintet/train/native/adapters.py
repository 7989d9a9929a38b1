"""LoRA's adapters by the C++ kernels. Tensors are contiguous; those of adapters are float32."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quintet.models.lora import Adapter
from quintet.train.native.library import CAdapter, Library
from quintet.train.workspace import Gradients


def adapters_backward(
    library: Library, x_TI: Tensor, grad_TO: Tensor, adapters: Sequence[tuple[Adapter, int]], gradients: Gradients
) -> None:
    """Adds the adapters' gradients to their `.grad`. With each adapter, the first of its outputs' columns in
    `grad_TO`; x and grad have one dtype, that of the products' inputs."""
    table = [
        _struct(adapter, first, *(gradients.begun(p) if p.requires_grad else None for p in adapter[:2]))
        for adapter, first in adapters
    ]
    shape = (*x_TI.shape, grad_TO.shape[1])
    library.call("adapters_backward", x_TI.dtype, *shape, x_TI, grad_TO, (CAdapter * len(table))(*table), len(table))


def merge(library: Library, base_OI: Tensor, adapters: Sequence[Adapter], out_OI: Tensor) -> None:
    """`out_OI` = base + the sum of scale up @ down, in float32, then rounded."""
    table = (CAdapter * len(adapters))(*(_struct(adapter, 0, None, None) for adapter in adapters))
    library.call("merge", out_OI.dtype, *base_OI.shape, base_OI, table, len(table), out_OI)


def _struct(adapter: Adapter, first: int, grad_down: Tensor | None, grad_up: Tensor | None) -> CAdapter:
    pointers = (None if x is None else x.data_ptr() for x in (adapter.down, adapter.up, grad_down, grad_up))
    return CAdapter(*pointers, len(adapter.down), first, len(adapter.up), adapter.scale)

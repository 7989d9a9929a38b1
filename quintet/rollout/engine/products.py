"""Matrix products of the torch path, their weights in the form that is fastest on the device."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.models.decoder.spec import ModelSpec
from quintet.rollout.engine.weights import FusedWeights


@dataclass(frozen=True)
class Product:
    """`x [T, in] -> [T, out]`. `weight` [out, in] is dense, or in oneDNN's own order of blocks."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, pack: bool) -> Product:
        # the ops that torch's own compiler packs a frozen model with; F.linear reorders the weight at every call
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight) if pack else weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    """As `LayerWeights`; norms in float32."""

    input_norm: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


class PackedWeights:
    """Packed on load where oneDNN computes `dtype` on the device; elsewhere dense, and loaded in place.

    `compute`: the dtype of products and of what goes through them. It is `dtype`, or float32 on a processor whose
    float32 products are quicker than bf16's (Intel's without AMX: 1.6 times, at 128 rows).
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._device, self._dtype = spec, device, dtype
        self.packs = device.type == "cpu" and _onednn_computes(dtype)
        self.compute = torch.float32 if self.packs and dtype == torch.bfloat16 and _float32_is_faster() else dtype
        self._dense: FusedWeights | None = None
        self.bytes = 0
        self.embedding, self.norm = torch.empty(0), torch.empty(0)
        self.layers: list[Layer] = []

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """From a Hugging Face state dict; see `load_weights` for what is refused."""
        dense = self._dense or FusedWeights(self._spec, self._device, self._dtype)
        dense.load(weights)
        self.embedding, self.norm = dense.embedding, dense.norm.float()
        self.head = self._product(dense.head, None)
        self.layers = [self._layer(dense, index) for index in range(self._spec.layers)]
        self.bytes = dense.bytes + (self._embedding_bytes if self.packs and self._spec.tied else 0)
        if self.compute != self._dtype:
            self.bytes = 2 * self.bytes - self._embedding_bytes
        self._dense = None if self.packs else dense

    @property
    def _embedding_bytes(self) -> int:
        return self.embedding.numel() * self.embedding.element_size()

    def _product(self, weight: Tensor, bias: Tensor | None) -> Product:
        return Product.of(weight.to(self.compute), None if bias is None else bias.to(self.compute), pack=self.packs)

    def _layer(self, dense: FusedWeights, index: int) -> Layer:
        layer = dense.layers[index]
        return Layer(
            input_norm=layer.input_norm.float(),
            qkv=self._product(layer.qkv, layer.qkv_bias),
            q_norm=None if layer.q_norm is None else layer.q_norm.float(),
            k_norm=None if layer.k_norm is None else layer.k_norm.float(),
            output=self._product(layer.output, layer.output_bias),
            mlp_norm=layer.mlp_norm.float(),
            gate_up=self._product(layer.gate_up, layer.gate_up_bias),
            down=self._product(layer.down, layer.down_bias),
        )


def _onednn_computes(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


@functools.cache
def _float32_is_faster() -> bool:
    """Whether oneDNN's float32 products take clearly less time than its bf16 ones: measured once, some ten
    milliseconds, often enough that a turn is met in which nothing else ran."""
    x = torch.ones(128, 512)
    sides = [(x.to(dtype), Product.of(x.to(dtype), None, pack=True)) for dtype in (torch.bfloat16, torch.float32)]
    times: list[list[float]] = [[], []]
    for _ in range(40):
        for (rows, product), taken in zip(sides, times, strict=True):
            began = time.perf_counter()
            product(rows)
            taken.append(time.perf_counter() - began)
    bf16, float32 = (min(taken) for taken in times)
    return float32 < 0.8 * bf16

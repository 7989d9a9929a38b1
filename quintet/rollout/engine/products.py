"""Matrix products of the torch path, their weights in the form that is fastest on the device."""

from __future__ import annotations

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
    """Packed on load where oneDNN computes `dtype` on the device; elsewhere dense, and loaded in place."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._device, self._dtype = spec, device, dtype
        self.packs = device.type == "cpu" and _onednn_computes(dtype)
        self._dense: FusedWeights | None = None
        self.bytes = 0
        self.embedding, self.norm = torch.empty(0), torch.empty(0)
        self.layers: list[Layer] = []

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """From a Hugging Face state dict; see `load_weights` for what is refused."""
        dense = self._dense or FusedWeights(self._spec, self._device, self._dtype)
        dense.load(weights)
        self.embedding, self.norm = dense.embedding, dense.norm.float()
        self.head = Product.of(dense.head, None, pack=self.packs)
        self.layers = [self._layer(dense, index) for index in range(self._spec.layers)]
        self.bytes = dense.bytes + (self._embedding_bytes if self.packs and self._spec.tied else 0)
        self._dense = None if self.packs else dense

    @property
    def _embedding_bytes(self) -> int:
        return self.embedding.numel() * self.embedding.element_size()

    def _layer(self, dense: FusedWeights, index: int) -> Layer:
        layer = dense.layers[index]
        return Layer(
            input_norm=layer.input_norm.float(),
            qkv=Product.of(layer.qkv, layer.qkv_bias, pack=self.packs),
            q_norm=None if layer.q_norm is None else layer.q_norm.float(),
            k_norm=None if layer.k_norm is None else layer.k_norm.float(),
            output=Product.of(layer.output, layer.output_bias, pack=self.packs),
            mlp_norm=layer.mlp_norm.float(),
            gate_up=Product.of(layer.gate_up, layer.gate_up_bias, pack=self.packs),
            down=Product.of(layer.down, layer.down_bias, pack=self.packs),
        )


def _onednn_computes(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32

"""A model in the C++ kernels: weights packed on load, one call per step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from quintet.models.decoder.forward import RopeTable
from quintet.models.decoder.spec import ModelSpec, tensor_shapes, tied_names
from quintet.models.native.unit import Unit
from quintet.rollout.engine.loading import check_weights
from quintet.rollout.engine.native.library import Library
from quintet.rollout.engine.step import PAGE, Step

# As `enum Part` in model.h
_PARTS = {
    "embed_tokens": 0,
    "lm_head": 1,
    "norm": 2,
    "input_layernorm": 3,
    "post_attention_layernorm": 4,
    "q_norm": 5,
    "k_norm": 6,
    "q_proj": 7,
    "k_proj": 8,
    "v_proj": 9,
    "o_proj": 10,
    "gate_proj": 11,
    "up_proj": 12,
    "down_proj": 13,
}
_SIZES = ("vocabulary", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "threads")
_SWITCHES = ("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "unit")
_COUNTS = ("tokens", "members", "groups", "logits", "samplers")
_MEMBERS = ("ids", "member_start", "member_count", "member_position", "member_row", "own_before", "member_writes")
_GROUPS = ("group_start", "shared_start", "shared_ids", "shared_counts")
_REST = ("cosines", "sines", "logit_token", "sampler_logit", "draws", "sampled", "logprobs", "all_logits")


class _Spec(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in _SIZES + _SWITCHES),
        ("norm_eps", ctypes.c_float),
        ("pages", ctypes.c_int64),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in _COUNTS),
        *((name, ctypes.c_void_p) for name in (*_MEMBERS, "own_table")),
        ("own_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _GROUPS + _REST),
    ]


class NativeModel:
    """`StepModel` over the kernels. `pages` KV pages may be used; memory is taken as they are first touched.
    `unit`: what bf16 products run on; None: the fastest here.

    Raises MemoryError when the address space does not hold them.
    """

    def __init__(
        self,
        library: Library,
        spec: ModelSpec,
        dtype: torch.dtype,
        *,
        pages: int,
        threads: int,
        unit: Unit | None = None,
    ) -> None:
        bf16 = dtype == torch.bfloat16
        assert library.page == PAGE
        self.dtype = dtype
        self._library, self._spec = library, spec
        unit = library.unit if unit is None else unit
        self._rope = RopeTable(spec.inv_freq, spec.rope_scale, torch.device("cpu"), torch.float32)
        self.path = f"native, {unit if bf16 else library.float32_unit}, {threads} threads"
        c_spec = _Spec(
            vocabulary=spec.vocab_size,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            threads=threads,
            qkv_bias=spec.qkv_bias,
            output_bias=spec.output_bias,
            mlp_bias=spec.mlp_bias,
            qk_norm=spec.qk_norm,
            unit=unit,
            norm_eps=spec.norm_eps,
            pages=pages + 1,
        )
        self._handle = library.c.quintet_open(ctypes.byref(c_spec), bf16)
        if not self._handle:
            raise MemoryError(f"no memory for the weights and {pages} KV pages")

    def __del__(self) -> None:
        self._library.c.quintet_close(self._handle)

    def bytes(self, pages: int) -> int:
        c = self._library.c
        return int(c.quintet_weight_bytes(self._handle) + pages * c.quintet_page_bytes(self._handle))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        given = check_weights(tensor_shapes(self._spec), tied_names(self._spec), weights)
        for name, tensor in given.items():
            layer, part, bias = _place(name)
            self._load(layer, part, bias, tensor)
            if part in (0, 1) and self._spec.tied:
                self._load(layer, 1 - part, bias, tensor)

    def run(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        sampled = np.empty(len(step.sampler_logit), dtype=np.int32)
        logprobs = np.empty(len(sampled), dtype=np.float32)
        self._step(step, sampled, logprobs, None)
        return sampled, logprobs

    def logits(self, step: Step) -> Tensor:
        logits = torch.empty(len(step.logit_token), self._spec.vocab_size)
        nothing = np.empty(0, dtype=np.float32)
        self._step(step, nothing, nothing, logits)
        return logits

    def clear_pages(self, pages: np.ndarray) -> None:
        ids = np.ascontiguousarray(pages, dtype=np.int32)
        self._library.c.quintet_clear_pages(self._handle, ids.ctypes.data, len(ids))

    def read_kv(self, pages: np.ndarray, counts: np.ndarray) -> Tensor:
        spec = self._spec
        kv = torch.empty(2, spec.layers, spec.kv_heads, int(counts.sum()), spec.head_dim, dtype=self.dtype)
        self._exchange(self._library.c.quintet_read_pages, pages, counts, kv)
        return kv

    def write_kv(self, pages: np.ndarray, counts: np.ndarray, kv: Tensor) -> None:
        self._exchange(self._library.c.quintet_write_pages, pages, counts, kv.contiguous())

    def _exchange(self, function: Callable[..., None], pages: np.ndarray, counts: np.ndarray, kv: Tensor) -> None:
        ids, held = (np.ascontiguousarray(array, dtype=np.int32) for array in (pages, counts))
        function(self._handle, ids.ctypes.data, held.ctypes.data, len(ids), kv.data_ptr())

    def products_s(self, rows: int) -> float:
        """Seconds of a step's matrix products alone, over `rows` tokens: the bound that a step is measured against."""
        return float(self._library.c.quintet_products(self._handle, rows))

    def read_bandwidth(self, mebibytes: int = 512) -> float:
        """Bytes per second at which the model's threads read memory."""
        block = torch.ones(mebibytes * 2**18)
        read_sum = ctypes.c_float()
        seconds = self._library.c.quintet_read(self._handle, block.data_ptr(), block.nbytes, ctypes.byref(read_sum))
        return float(block.nbytes / seconds)

    def _load(self, layer: int, part: int, bias: bool, tensor: Tensor) -> None:
        dtype = torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float32
        source = tensor.detach().to("cpu", dtype).contiguous()
        self._library.c.quintet_load(self._handle, layer, part, bias, source.data_ptr(), source.dtype == torch.bfloat16)

    def _step(self, step: Step, sampled: np.ndarray, logprobs: np.ndarray, logits: Tensor | None) -> None:
        cosines, sines = self._rope.table(step.last_position)
        pointers = {name: getattr(step, name).ctypes.data for name in (*_MEMBERS, "own_table", *_GROUPS)}
        c_step = _Step(
            tokens=len(step.ids),
            members=len(step.member_start),
            groups=len(step.group_start) - 1,
            logits=len(step.logit_token),
            samplers=len(sampled),
            own_stride=step.own_table.shape[1],
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            logit_token=step.logit_token.ctypes.data,
            sampler_logit=step.sampler_logit.ctypes.data,
            draws=step.draws.ctypes.data,
            sampled=sampled.ctypes.data,
            logprobs=logprobs.ctypes.data,
            all_logits=None if logits is None else logits.data_ptr(),
            **pointers,
        )
        if not self._library.c.quintet_step(self._handle, ctypes.byref(c_step)):
            raise MemoryError(f"no memory for a step of {len(step.ids)} tokens")


def _place(name: str) -> tuple[int, int, bool]:
    """Layer (-1: none), part and whether it is a bias, of a tensor's name in the state dict."""
    *path, part, kind = name.split(".")
    layer = int(path[2]) if path[:2] == ["model", "layers"] else -1
    return layer, _PARTS[part], kind == "bias"

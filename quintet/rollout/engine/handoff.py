"""What a prefill worker hands to a decode worker: a prompt's keys and values, and each sample's first token.

The first token is sampled where the prompt's last logits are; its draw is keyed as every other's, so that it is the one
that an unsplit engine draws. Keys and values travel as plain numbers in the model's dtype, token for token and free of
pages, so that the C++ kernels and plain torch read each other's.

On the wire: a JSON line (`Header`), then the numbers [2, layers, kv_heads, tokens, head_dim], little-endian.
"""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from quintet.models.decoder.spec import ModelSpec
from quintet.types import Group, QuintetError, Rollout, SamplingParams


class PrefillFailed(QuintetError):
    """A prompt's KV could not be had, or no longer fits the decode worker's weights: ask a prefill worker again."""


class KVLayout(msgspec.Struct, frozen=True):
    """What keys and values are; equal for two engines that can go on from each other's."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    positions: str  # digest of the rotary frequencies, which keys have in them

    @classmethod
    def of(cls, spec: ModelSpec, dtype: torch.dtype) -> KVLayout:
        rotary = spec.inv_freq.float().numpy().tobytes() + repr(spec.rope_scale).encode()
        positions = hashlib.sha256(rotary).hexdigest()[:8]
        return cls(spec.layers, spec.kv_heads, spec.head_dim, str(dtype).removeprefix("torch."), positions)

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        found = vars(torch).get(self.dtype)
        if not isinstance(found, torch.dtype):
            raise PrefillFailed(f"there are no keys and values of type {self.dtype!r}")
        return found

    def shape(self, tokens: int) -> tuple[int, ...]:
        return 2, self.layers, self.kv_heads, tokens, self.head_dim

    def __str__(self) -> str:
        heads = f"{self.layers} layers with {self.kv_heads} KV heads of {self.head_dim}"
        return f"{heads} in {self.dtype}, rotary frequencies {self.positions}"


@dataclass(frozen=True)
class Prefilled:
    """One group after its prompt. `rollouts` have their first token; those that end with it are whole, the others say
    `length`. `kv` [2, layers, kv_heads, tokens, head_dim] on the CPU is None where no sample goes on."""

    version: int  # weights that `kv` was computed with
    layout: KVLayout
    rollouts: list[Rollout]
    kv: Tensor | None

    def check(self, group: Group, params: SamplingParams, version: int) -> None:
        """Raises PrefillFailed unless it is of this request and of weight version `version`."""
        if self.kv is not None and self.version != version:
            raise PrefillFailed(
                f"the prompt's KV is of weight version {self.version}, the decode worker has version {version}"
            )
        asked = [(group.group_id, params.first_sample + i, group.prompt.token_ids) for i in range(params.n)]
        if [(r.group_id, r.sample_index, r.prompt_ids) for r in self.rollouts] != asked:
            raise PrefillFailed(f"the prefill worker answered another request than group {group.group_id}")
        if self.kv is not None and tuple(self.kv.shape) != self.layout.shape(len(group.prompt.token_ids)):
            raise PrefillFailed(f"the KV is not that of the {len(group.prompt.token_ids)} tokens of the prompt")


class Header(msgspec.Struct):
    """The first line. `tokens` 0: no KV follows. `shared`: a file of this machine that holds the KV instead."""

    version: int
    layout: KVLayout
    tokens: int
    rollouts: list[Rollout]
    shared: str = ""

    @property
    def kv_bytes(self) -> int:
        return self.tokens * self.layout.token_bytes

    @classmethod
    def of(cls, found: Prefilled, shared: str = "") -> Header:
        tokens = 0 if found.kv is None else found.kv.shape[3]
        return cls(found.version, found.layout, tokens, found.rollouts, shared)

    def with_kv(self, numbers: bytearray | mmap.mmap) -> Prefilled:
        """`numbers`: the KV's bytes, not copied. Raises PrefillFailed when it is another number of them."""
        kv = None
        if self.tokens:
            if len(numbers) != self.kv_bytes:
                raise PrefillFailed(f"{len(numbers)} bytes of KV came, not {self.kv_bytes}")
            kv = torch.frombuffer(numbers, dtype=self.layout.torch_dtype).view(self.layout.shape(self.tokens))
        return Prefilled(self.version, self.layout, self.rollouts, kv)


def kv_bytes(kv: Tensor) -> memoryview:
    """The numbers of a contiguous tensor on the CPU, not copied."""
    return kv.view(torch.uint8).numpy().data.cast("B")

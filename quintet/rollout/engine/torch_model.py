"""A model in plain torch, on any device: what serves where the C++ kernels cannot.

Same distribution and, in float32, the same greedy ids as the kernels. Attention is two batched products per part:
over the shared pages of a group (gathered once for all its samples) and over each sample's own pages, merged by their
maxima and sums; sequences of similar size go together, so little is padded. Heads of one KV head lie side by side,
KV heads outermost, so that gathered pages are the operands of the products as they come. Weights are packed by oneDNN
where torch has it for the processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.models.decoder.forward import RopeTable, rms_norm
from quintet.models.decoder.spec import ModelSpec
from quintet.rollout.engine.products import Layer, PackedWeights
from quintet.rollout.engine.sampling import SamplingRows, sample
from quintet.rollout.engine.step import PAGE, Step

_FIRST_PAGES = 64
_MAX_SCORES = 2**24  # attention scores held at once


@dataclass(frozen=True)
class Part:
    """N lists of P pages of similar length, each seen by C tokens (short lists of tokens repeat their last)."""

    tokens: Tensor  # [N * C] places in the step
    kept: Tensor | None  # entries of `tokens` that are real; None: all
    rows: Tensor  # [kv_heads * N * P] rows of the cache
    bias: Tensor  # [N, C or 1, 1, P * PAGE], 0 where a key is seen, else -inf


@dataclass(frozen=True)
class Mixed:
    """What the tokens found in one kind of part, K KV heads and G query heads each; nothing at all: peak -inf."""

    values: Tensor  # [K, T, G, head_dim] sum of values by exp(score - peak)
    peak: Tensor  # [K, T, G]
    mass: Tensor  # [K, T, G] sum of exp(score - peak)

    @classmethod
    def nothing(cls, spec: ModelSpec, tokens: int, device: torch.device) -> Mixed:
        shape = (spec.kv_heads, tokens, spec.query_group)
        return cls(
            torch.zeros(*shape, spec.head_dim, device=device),
            torch.full(shape, -torch.inf, device=device),
            torch.zeros(shape, device=device),
        )

    def put(self, part: Part, values: Tensor, peak: Tensor, mass: Tensor) -> None:
        """Each [K, N * C, G, ...]."""
        tokens = part.tokens if part.kept is None else part.tokens[part.kept]
        for held, new in ((self.values, values), (self.peak, peak), (self.mass, mass)):
            held.index_copy_(1, tokens, (new if part.kept is None else new[:, part.kept]).to(held.dtype))


class TorchModel:
    """`StepModel`; the cache grows as pages are first used."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, pages: int) -> None:
        self._spec, self._device, self.dtype = spec, device, dtype
        self._weights = PackedWeights(spec, device, dtype)
        self._rope = RopeTable(spec.inv_freq, spec.rope_scale, device, torch.float32)
        self._capacity = pages + 1
        self._kv = torch.zeros(self._kv_shape(min(self._capacity, _FIRST_PAGES)), device=device, dtype=dtype)
        self.path = f"torch on {device.type}, {str(dtype).removeprefix('torch.')}"

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._weights.load(weights)

    def bytes(self, pages: int) -> int:
        return self._weights.bytes + self._kv.numel() * self._kv.element_size()

    @torch.inference_mode()  # as the cache was made
    def clear_pages(self, pages: np.ndarray) -> None:
        held = pages[pages < self._kv.shape[2]]
        self._kv[:, :, torch.from_numpy(held).to(self._device, torch.int64)] = 0.0

    @torch.inference_mode()
    def read_kv(self, pages: np.ndarray, counts: np.ndarray) -> Tensor:
        where, offset = _token_places(pages, counts)
        rows = self._kv[:, :, self._tensor(where), :, self._tensor(offset)]  # [tokens, 2, layers, kv_heads, head_dim]
        return rows.permute(1, 2, 3, 0, 4).to("cpu").contiguous()

    @torch.inference_mode()
    def write_kv(self, pages: np.ndarray, counts: np.ndarray, kv: Tensor) -> None:
        self._grow(int(pages.max(initial=0)))
        where, offset = _token_places(pages, counts)
        rows = kv.to(self._device).permute(3, 0, 1, 2, 4)
        self._kv[:, :, self._tensor(where), :, self._tensor(offset)] = rows

    @torch.inference_mode()
    def run(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        logits = self._forward(step)
        if len(step.sampler_logit) != len(logits):
            logits = logits[self._tensor(step.sampler_logit)]
        draws = step.draws
        if not len(draws):
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        rows = SamplingRows(
            temperature=draws["temperature"].astype(np.float64),
            top_k=draws["top_k"].astype(np.int64),
            top_p=draws["top_p"],
            min_p=draws["min_p"],
            uniform=draws["uniform"],
        )
        ids_S, logprobs_S = sample(logits, rows)
        return ids_S.to("cpu", torch.int32).numpy(), logprobs_S.cpu().numpy()

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        return self._forward(step).float()

    def _forward(self, step: Step) -> Tensor:
        """Write KV; logits [L, vocabulary] in the model's dtype."""
        owner = np.repeat(np.arange(len(step.member_start)), step.member_count)
        within = np.arange(len(step.ids)) - step.member_start[owner]
        turns = self._turns(step.member_position[owner] + within, step.last_position)
        writes, places = self._writes(step, owner, within)
        parts = [list(self._shared(step)), list(self._own(step))]
        found = [Mixed.nothing(self._spec, len(step.ids), self._device) for _ in parts]
        x_TE = self._weights.embedding[self._tensor(step.ids)].float()
        for index, layer in enumerate(self._weights.layers):
            q_KTX, k_THD, v_THD = self._project(layer, self._normed(x_TE, layer.input_norm), *turns)
            keys, values = self._rows(0, index), self._rows(1, index)
            for stored, fresh in ((keys, k_THD), (values, v_THD)):
                rows = fresh if writes is None else fresh[writes]
                stored.view(-1, self._spec.head_dim).index_copy_(0, places, rows.reshape(-1, self._spec.head_dim))
            for kind, mixed in zip(parts, found, strict=True):
                for part in kind:
                    self._attend(q_KTX, keys, values, part, mixed)
            x_TE += layer.output(self._merge(*found))
            gate, up = layer.gate_up(self._normed(x_TE, layer.mlp_norm)).chunk(2, dim=-1)
            x_TE += layer.down(F.silu(gate).mul_(up))
        last = self._normed(x_TE[self._tensor(step.logit_token)], self._weights.norm)
        return self._weights.head(last)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._spec.norm_eps).to(self.dtype)

    def _turns(self, positions: np.ndarray, last: int) -> tuple[Tensor, Tensor]:
        """What `rotate` in model.py multiplies a head's halves with, and the halves in each other's place:
        [T, 1, head_dim] each."""
        cos, sin = self._rope.rows(self._tensor(positions), last)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def _project(self, layer: Layer, x_TE: Tensor, straight: Tensor, crossed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [kv_heads, T, query_group * head_dim], keys and values [T, kv_heads, head_dim]."""
        spec = self._spec
        fused = layer.qkv(x_TE).view(len(x_TE), -1, spec.head_dim)
        qk, v = fused.split([spec.heads + spec.kv_heads, spec.kv_heads], dim=1)
        qk = qk.float()
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([spec.heads, spec.kv_heads], dim=1)
            qk = torch.cat([rms_norm(q, layer.q_norm, spec.norm_eps), rms_norm(k, layer.k_norm, spec.norm_eps)], dim=1)
        qk = torch.addcmul(qk * straight, qk.roll(spec.head_dim // 2, dims=-1), crossed).to(self.dtype)
        q, k = qk.split([spec.heads, spec.kv_heads], dim=1)
        return q.reshape(len(q), spec.kv_heads, -1).transpose(0, 1).contiguous(), k, v

    def _attend(self, q_KTX: Tensor, keys: Tensor, values: Tensor, part: Part, mixed: Mixed) -> None:
        kv, group, width = self._spec.kv_heads, self._spec.query_group, self._spec.head_dim
        n, _, _, seen = part.bias.shape
        q = q_KTX.index_select(1, part.tokens).view(kv * n, -1, width)
        k, v = (x.index_select(0, part.rows).view(kv * n, seen, width) for x in (keys, values))
        products = torch.bmm(q, k.transpose(1, 2)).view(kv, n, -1, group, seen)
        scores = torch.add(part.bias, products, alpha=width**-0.5)
        peak = scores.amax(-1, keepdim=True)
        weights = scores.sub_(peak).exp_()
        out = torch.bmm(weights.view(kv * n, -1, seen).to(self.dtype), v)
        by_token = (kv, len(part.tokens), group)
        mixed.put(part, out.view(*by_token, width), peak.view(by_token), weights.sum(-1).view(by_token))

    def _merge(self, one: Mixed, other: Mixed) -> Tensor:
        """Attention over both kinds of parts [T, heads * head_dim] (arXiv 1805.02867)."""
        peak = torch.maximum(one.peak, other.peak)
        shares = [torch.exp(part.peak - peak) for part in (one, other)]
        total = one.mass * shares[0] + other.mass * shares[1]
        scales = [(share / total)[..., None] for share in shares]
        mixed_KTGD = torch.addcmul(one.values * scales[0], other.values, scales[1]).to(self.dtype)
        return mixed_KTGD.transpose(0, 1).reshape(mixed_KTGD.shape[1], -1)

    def _shared(self, step: Step) -> Iterator[Part]:
        """Each group's tokens over its shared pages."""
        ends = np.append(step.member_start, len(step.ids))[step.group_start]
        pages = np.diff(step.shared_start)
        for some in _alike(np.diff(ends), pages, self._spec.heads):
            table = np.zeros((len(some), pages[some].max()), dtype=np.int64)
            counts = np.zeros_like(table)
            for row, group in enumerate(some):
                where = slice(step.shared_start[group], step.shared_start[group + 1])
                table[row, : pages[group]], counts[row, : pages[group]] = (
                    step.shared_ids[where],
                    step.shared_counts[where],
                )
            seen = np.arange(PAGE) < counts[..., None]
            yield self._part(ends[some], np.diff(ends)[some], table, seen.reshape(len(some), 1, -1))

    def _own(self, step: Step) -> Iterator[Part]:
        """Each member's tokens over its own pages, up to themselves."""
        seen = np.where(step.member_writes > 0, step.own_before + step.member_count, 0)
        pages = -(-seen // PAGE)
        for some in _alike(step.member_count, pages, self._spec.heads):
            counts, width = step.member_count[some], int(pages[some].max())
            places = np.minimum(np.arange(counts.max()), counts[:, None] - 1) + step.own_before[some, None]
            shown = np.arange(width * PAGE) <= places[..., None]
            table = step.own_table[step.member_row[some], :width].astype(np.int64)
            table[np.arange(width) >= pages[some, None]] = 0  # what lies beyond is of an earlier user
            yield self._part(step.member_start[some], counts, table, shown)

    def _part(self, starts: np.ndarray, counts: np.ndarray, table: np.ndarray, seen: np.ndarray) -> Part:
        width = int(counts.max())
        places = np.minimum(np.arange(width), counts[:, None] - 1)
        real = np.arange(width) < counts[:, None]
        heads = np.arange(self._spec.kv_heads)[:, None]
        bias = torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), -torch.inf)
        return Part(
            tokens=self._tensor((starts[:, None] + places).ravel()),
            kept=None if real.all() else self._tensor(np.flatnonzero(real)),
            rows=self._tensor((table.ravel() * len(heads) + heads).ravel()),
            bias=bias.to(self._device)[:, :, None],
        )

    def _writes(self, step: Step, owner: np.ndarray, within: np.ndarray) -> tuple[Tensor | None, Tensor]:
        """Tokens whose KV is written (None: all) and its rows in [pages * kv_heads * PAGE]."""
        writing = step.member_writes[owner] > 0
        at = (step.own_before[owner] + within)[writing]
        pages = step.own_table[step.member_row[owner][writing], at // PAGE].astype(np.int64)
        self._grow(int(step.own_table.max()))
        heads = self._spec.kv_heads
        rows = (pages[:, None] * heads + np.arange(heads)) * PAGE + (at % PAGE)[:, None]
        return None if writing.all() else self._tensor(np.flatnonzero(writing)), self._tensor(rows.ravel())

    def _grow(self, page: int) -> None:
        held = self._kv.shape[2]
        if page >= held:
            extra = min(self._capacity, max(page + 1, 2 * held)) - held
            self._kv = torch.cat([self._kv, self._kv.new_zeros(self._kv_shape(extra))], dim=2)

    def _rows(self, kind: int, layer: int) -> Tensor:
        """Keys (0) or values (1) of a layer, [pages * kv_heads, PAGE * head_dim]."""
        return self._kv[kind, layer].view(-1, PAGE * self._spec.head_dim)

    def _kv_shape(self, pages: int) -> tuple[int, ...]:
        return (2, self._spec.layers, pages, self._spec.kv_heads, PAGE, self._spec.head_dim)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)


def _token_places(pages: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Page of each token, and its place in it."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(pages, counts), within


def _alike(tokens: np.ndarray, pages: np.ndarray, heads: int) -> Iterator[np.ndarray]:
    """Indices with pages, in lots that waste at most half on padding and stay within the scores held at once."""
    kinds = np.stack([np.frexp(tokens - 0.5)[1], np.frexp(pages - 0.5)[1]])  # powers of two that are not exceeded
    for kind in np.unique(kinds[:, pages > 0], axis=1).T:
        lot = np.flatnonzero((kinds == kind[:, None]).all(axis=0) & (pages > 0))
        scores = len(lot) * heads * int(tokens[lot].max()) * int(pages[lot].max()) * PAGE
        yield from np.array_split(lot, min(len(lot), -(-scores // _MAX_SCORES)))

"""A model in plain torch, on any device: what serves where the C++ kernels cannot.

Same distribution and, in float32, the same greedy ids as the kernels. Attention is two batched products per part:
over the shared pages of a group (gathered once for all its samples) and over each sample's own pages, merged by their
maxima and sums; sequences of similar size go together, so little is padded. Weights are prepacked by oneDNN where
torch has it for the processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.rollout.engine.model import RopeTable, rms_norm, rotate
from quintet.rollout.engine.sampling import SamplingRows, sample
from quintet.rollout.engine.spec import ModelSpec
from quintet.rollout.engine.step import PAGE, Step
from quintet.rollout.engine.weights import FusedWeights, LayerWeights

_FIRST_PAGES = 64
_MAX_SCORES = 2**24  # attention scores held at once


@dataclass(frozen=True)
class Part:
    """N lists of pages of similar length, each seen by C tokens (short lists of tokens repeat their last)."""

    tokens: Tensor  # [N * C] places in the step
    kept: Tensor  # entries of `tokens` that are real
    pages: Tensor  # [N, P]
    bias: Tensor  # [N, 1, C or 1, P * PAGE], 0 where a key is seen, else -inf


class TorchModel:
    """`StepModel`; the cache grows as pages are first used."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, pages: int) -> None:
        self._spec, self._device, self.dtype = spec, device, dtype
        self._weights = FusedWeights(spec, device, dtype)
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
        logits = self.logits(step)
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
        spec = self._spec
        owner = np.repeat(np.arange(len(step.member_start)), step.member_count)
        within = np.arange(len(step.ids)) - step.member_start[owner]
        cos, sin = self._rope.rows(self._tensor(step.member_position[owner] + within), step.last_position)
        writes, places = self._writes(step, owner, within)
        parts = [list(self._shared(step)), list(self._own(step))]
        x_TE = self._weights.embedding[self._tensor(step.ids)].float()
        for index, layer in enumerate(self._weights.layers):
            q_THD, k_THD, v_THD = self._project(layer, self._normed(x_TE, layer.input_norm), cos, sin)
            keys, values = self._kv[0, index], self._kv[1, index]
            for stored, fresh in ((keys, k_THD), (values, v_THD)):
                rows = fresh if writes is None else fresh[writes]
                stored.view(-1, spec.head_dim).index_copy_(0, places, rows.reshape(-1, spec.head_dim))
            mixed_TX = self._attend(q_THD, keys, values, parts)
            x_TE += F.linear(mixed_TX, layer.output, layer.output_bias)
            gate, up = F.linear(self._normed(x_TE, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x_TE += F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        last = self._normed(x_TE[self._tensor(step.logit_token)], self._weights.norm)
        return F.linear(last, self._weights.head).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.float(), self._spec.norm_eps).to(self.dtype)

    def _project(self, layer: LayerWeights, x_TE: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (scaled), keys and values [T, heads, head_dim]."""
        spec = self._spec
        fused = F.linear(x_TE, layer.qkv, layer.qkv_bias).view(len(x_TE), -1, spec.head_dim)
        q, k, v = fused.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        q, k = q.float(), k.float()
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm.float(), spec.norm_eps)
            k = rms_norm(k, layer.k_norm.float(), spec.norm_eps)
        q = rotate(q, cos, sin) * spec.head_dim**-0.5
        return q.to(self.dtype), rotate(k, cos, sin).to(self.dtype), v

    def _attend(self, q_THD: Tensor, keys: Tensor, values: Tensor, parts: list[list[Part]]) -> Tensor:
        """Both kinds of parts, merged by their maxima and sums (arXiv 1805.02867); [T, heads * head_dim]."""
        tokens, heads, width = q_THD.shape
        peak = torch.full((2, tokens, heads), -torch.inf, device=q_THD.device)
        total = torch.zeros(2, tokens, heads, device=q_THD.device)
        mixed = torch.zeros(2, tokens, heads, width, device=q_THD.device)
        for kind, some in enumerate(parts):
            for part in some:
                out, top, mass = self._attend_part(q_THD, keys, values, part)
                where = part.tokens[part.kept]
                mixed[kind, where], peak[kind, where], total[kind, where] = out, top, mass
        share = torch.exp(peak - peak.amax(0))
        mixed, total = (mixed * share[..., None]).sum(0), (total * share).sum(0)
        return (mixed / total[..., None]).to(q_THD.dtype).view(tokens, heads * width)

    def _attend_part(self, q_THD: Tensor, keys: Tensor, values: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        n, pages = part.pages.shape
        kv, width = self._spec.kv_heads, self._spec.head_dim
        group = self._spec.query_group
        q = q_THD[part.tokens].view(n, -1, kv, group, width).transpose(1, 2).reshape(n * kv, -1, width)
        k, v = (x[part.pages].transpose(1, 2).reshape(n * kv, pages * PAGE, width) for x in (keys, values))
        scores = torch.bmm(q, k.transpose(1, 2)).float().view(n, kv, -1, group, pages * PAGE)
        scores += part.bias[:, :, :, None]
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        mass = weights.sum(-1)
        out = torch.bmm(weights.view(n * kv, -1, pages * PAGE).to(q.dtype), v).float()

        def by_token(x: Tensor) -> Tensor:  # [n, kv, tokens, group, ...] -> [kept, heads, ...]
            return x.transpose(1, 2).reshape(-1, kv * group, *x.shape[4:])[part.kept]

        return by_token(out.view(n, kv, -1, group, width)), by_token(top.squeeze(-1)), by_token(mass)

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
        bias = torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), -torch.inf)
        return Part(
            tokens=self._tensor((starts[:, None] + places).ravel()),
            kept=self._tensor(np.flatnonzero(np.arange(width) < counts[:, None])),
            pages=self._tensor(table),
            bias=bias.to(self._device)[:, None],
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

    def _kv_shape(self, pages: int) -> tuple[int, ...]:
        return (2, self._spec.layers, pages, self._spec.kv_heads, PAGE, self._spec.head_dim)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)


def _token_places(pages: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Page of each token, and its place in it."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(pages, counts), within


def _alike(tokens: np.ndarray, pages: np.ndarray, heads: int) -> Iterator[np.ndarray]:
    """Indices with pages, in lots that waste at most about half on padding and stay within the scores held at once."""
    order = np.lexsort((pages, tokens))
    lot: list[int] = []
    for index in order[pages[order] > 0].tolist():
        wide = max([index, *lot], key=lambda i: pages[i])
        narrow = min([index, *lot], key=lambda i: pages[i])
        scores = (len(lot) + 1) * heads * int(tokens[index]) * int(pages[wide]) * PAGE
        if lot and (tokens[index] > 2 * tokens[lot[0]] or pages[wide] > 2 * pages[narrow] or scores > _MAX_SCORES):
            yield np.array(lot)
            lot = []
        lot.append(index)
    if lot:
        yield np.array(lot)

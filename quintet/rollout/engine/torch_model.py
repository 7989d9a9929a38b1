"""A model in plain torch, on any device: what serves where the C++ kernels cannot.

Same distribution and, in float32, the same greedy ids as the kernels. Attention is batched products of three kinds,
merged by their largest scores (arXiv 1805.02867): over the shared pages of a group (gathered once for all its samples),
over a decoding sample's own pages (a product per page, where it lies in the cache; `embedding_bag` adds up what comes
of them in one pass), and over the own pages of what has several new tokens (gathered). Decoding samples whose pages are
few have all of them gathered, shared ones each for itself: then fewer operations count for more than fewer bytes.
Weights are packed by oneDNN where torch has it for the processor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.models.decoder.forward import RopeTable, rms_norm
from quintet.models.decoder.spec import ModelSpec
from quintet.models.memory import huge_pages
from quintet.rollout.engine.products import Layer, PackedWeights
from quintet.rollout.engine.sampling import SamplingRows, sample
from quintet.rollout.engine.step import PAGE, Step

_FIRST_PAGES = 64
_DENSE = 2  # own pages are used where they lie while at most this times as many lie between them
_FEW_KEYS = 2**23  # numbers: where the pages of all tokens have no more, copying them costs less than many operations
_MAX_SCORES = 2**24  # attention scores held at once
_FEW_SCORES = 2**20  # where there are no more, padding costs less than a product more
_LEAST = -80.0  # scores below the largest are raised to this: exp of less is slow, and adds nothing


@dataclass(frozen=True)
class Part:
    """N lists of P pages of similar length, each seen by C tokens (short lists of tokens repeat their last)."""

    tokens: Tensor | None  # [N * C] places in the step; None: all of the step's, in order
    kept: Tensor | None  # entries of `tokens` that are real; None: all
    whole: bool  # `kept` are all of the step's tokens, in order
    rows: Tensor  # [2 * kv_heads * N * P] rows of a layer's cache, PAGE keys or values of one head each, keys first
    bias: Tensor  # [N, C or 1, 1, P * PAGE], 0 where a key is seen, else -inf


@dataclass(frozen=True)
class OwnPages:
    """P pages of the cache, each seen by one of N tokens; of no meaning for those that `table` does not name."""

    places: slice | Tensor  # where they lie, or as `AllPages.rows`
    owner: Tensor  # [P] tokens
    bias: Tensor  # [P, 1, 1, PAGE], 0 where a key is seen, else -inf
    tokens: Tensor | None  # [N]; None: all of the step's, in order
    rank: Tensor  # [P] owners among `tokens`
    table: Tensor  # pages, those of a token side by side
    starts: Tensor  # [N] where each token's begin in `table`
    padded: Tensor  # [N * W] as `table`, the last of each token repeated


@dataclass(frozen=True)
class AllPages:
    """P pages of each of the step's N tokens, shared ones before its own (short lists end in pages not seen)."""

    rows: Tensor  # [2 * N * kv_heads * P] rows of a layer's cache, PAGE keys or values of one head each, keys first
    bias: Tensor  # [N, 1, 1, P * PAGE] in the cache's dtype, 0 where a key is seen, else -inf


class Mixed:
    """What the step's T tokens have found so far, H heads each: their largest scores [T, H], the sums over keys of
    exp(score - largest) [T, H], and those sums with the keys' values [T, H, head_dim]."""

    def __init__(self, tokens: int, spec: ModelSpec, device: torch.device) -> None:
        self._shape, self._device = (tokens, spec.heads, spec.head_dim), device
        self._found: tuple[Tensor, Tensor, Tensor] | None = None

    def peak(self, tokens: Tensor | None) -> Tensor | None:
        """-inf: nothing was found; None: by no token."""
        if self._found is None:
            return None
        return self._found[0] if tokens is None else self._found[0].index_select(0, tokens)

    def add(self, tokens: Tensor | None, peak: Tensor, total: Tensor, values: Tensor) -> None:
        """`tokens` (None: all, in order) found this; `peak` is not below what it was."""
        if self._found is None and tokens is None:
            self._found = (peak, total, values)
            return
        if self._found is None:
            none, zeros = (torch.zeros(shape, device=self._device) for shape in (self._shape[:2], self._shape))
            self._found = (torch.full_like(none, -torch.inf), none, zeros)
        held = [x if tokens is None else x.index_select(0, tokens) for x in self._found]
        fade = (held[0] - peak).exp_()
        total = torch.addcmul(total, held[1], fade)
        values = torch.addcmul(values, held[2], fade[..., None])
        if tokens is None:
            self._found = (peak, total, values)
            return
        for whole, part in zip(self._found, (peak, total, values), strict=True):
            whole.index_copy_(0, tokens, part)

    def result(self) -> Tensor:
        """Attention, float32 [T, heads * head_dim]."""
        assert self._found is not None
        _, total, values = self._found
        return (values / total[..., None]).flatten(1)


class TorchModel:
    """`StepModel`. The cache takes memory as pages are first used: a CPU's by itself, that of other devices by growing.

    Raises MemoryError when the address space does not hold `pages`.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, pages: int) -> None:
        self._spec, self._device, self.dtype = spec, device, dtype
        self._weights = PackedWeights(spec, device, dtype)
        self._eps = torch.tensor(spec.norm_eps, device=device)
        self._rope = RopeTable(spec.inv_freq, spec.rope_scale, device, torch.float32)
        self._capacity = pages + 1
        self._kv = self._empty_cache()
        self._gathered = torch.empty(0, PAGE * spec.head_dim, device=device, dtype=dtype)
        names = [str(t).removeprefix("torch.") for t in (dtype, self._weights.compute)]
        self.path = f"torch on {device.type}, {names[0]}, products in {names[1]}"

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._weights.load(weights)

    def bytes(self, pages: int) -> int:
        held = pages if self._device.type == "cpu" else self._kv.shape[2]
        return self._weights.bytes + math.prod(self._kv_shape(held)) * self.dtype.itemsize

    @torch.inference_mode()  # as the cache was made
    def clear_pages(self, pages: np.ndarray) -> None:
        held = pages[pages < self._kv.shape[2]]
        self._kv[:, :, torch.from_numpy(held).to(self._device, torch.int64)] = 0.0

    @torch.inference_mode()
    def read_kv(self, pages: np.ndarray, counts: np.ndarray) -> Tensor:
        where, offset = _token_places(pages, counts)
        rows = self._kv[:, :, self._tensor(where), :, self._tensor(offset)]  # [tokens, layers, 2, kv_heads, head_dim]
        return rows.permute(2, 1, 3, 0, 4).to("cpu").contiguous()

    @torch.inference_mode()
    def write_kv(self, pages: np.ndarray, counts: np.ndarray, kv: Tensor) -> None:
        self._grow(int(pages.max(initial=0)))
        where, offset = _token_places(pages, counts)
        rows = kv.to(self._device).permute(3, 1, 0, 2, 4)
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
        """Write KV; logits [L, vocabulary] in the dtype of products."""
        owner = np.repeat(np.arange(len(step.member_start)), step.member_count)
        within = np.arange(len(step.ids)) - step.member_start[owner]
        turns = self._turns(step.member_position[owner] + within, step.last_position)
        writes, places = self._writes(step, owner, within)
        attention = self._attention(step)
        x_TE = self._weights.embedding[self._tensor(step.ids)].float()
        for index, layer in enumerate(self._weights.layers):
            q_TX, kv_TXD = self._project(layer, self._normed(x_TE, layer.input_norm), *turns)
            rows = kv_TXD if writes is None else kv_TXD[writes]
            self._kv[index].view(-1, self._spec.head_dim).index_copy_(0, places, rows.reshape(-1, self._spec.head_dim))
            x_TE += layer.output(attention(q_TX, self._kv[index]).to(self._weights.compute))
            gate, up = layer.gate_up(self._normed(x_TE, layer.mlp_norm)).chunk(2, dim=-1)
            x_TE += layer.down(F.silu(gate).mul_(up))
        last = self._normed(x_TE[self._tensor(step.logit_token)], self._weights.norm)
        return self._weights.head(last)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `rms_norm`, in fewer operations."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight).to(self._weights.compute)

    def _turns(self, positions: np.ndarray, last: int) -> tuple[Tensor, Tensor]:
        """What `rotate` in model.py multiplies the halves of a head with, and the halves in each other's place:
        [T, heads + 2 * kv_heads, head_dim] each; values stay as they are."""
        cos, sin = self._rope.rows(self._tensor(positions), last)
        straight, crossed = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        turned, kept = (1, self._spec.heads + self._spec.kv_heads, 1), (1, self._spec.kv_heads, 1)
        straight = torch.cat([straight.repeat(turned), torch.ones_like(straight).repeat(kept)], dim=1)
        crossed = torch.cat([crossed.repeat(turned), torch.zeros_like(crossed).repeat(kept)], dim=1)
        return straight, crossed

    def _project(self, layer: Layer, x_TE: Tensor, straight: Tensor, crossed: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, heads * head_dim]; keys and after them values [T, 2 * kv_heads, head_dim]."""
        spec = self._spec
        fused = layer.qkv(x_TE).view(len(x_TE), -1, spec.head_dim).float()
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, v = fused.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
            q, k = rms_norm(q, layer.q_norm, spec.norm_eps), rms_norm(k, layer.k_norm, spec.norm_eps)
            fused = torch.cat([q, k, v], dim=1)
        turned = torch.addcmul(fused * straight, fused.roll(spec.head_dim // 2, dims=-1), crossed).to(self.dtype)
        return turned[:, : spec.heads].flatten(1), turned[:, spec.heads :]

    def _attention(self, step: Step) -> Callable[[Tensor, Tensor], Tensor]:
        """Of queries [T, heads * head_dim] and a layer's cache; as many."""
        every = self._all_pages(step)
        if every is not None:
            return functools.partial(self._attend_all, pages=every)
        parts, pages = [*self._shared(step), *self._own(step)], self._own_pages(step)

        def attend(q_TX: Tensor, cache: Tensor) -> Tensor:
            mixed = Mixed(len(q_TX), self._spec, self._device)
            for part in parts:
                self._attend(q_TX, cache, part, mixed)
            if pages is not None:
                self._attend_pages(q_TX, cache, pages, mixed)
            return mixed.result()

        return attend

    def _gather(self, cache: Tensor, rows: Tensor) -> Tensor:
        """Rows of a layer's cache, valid until the next call: memory that is new each time costs more than copying."""
        if len(rows) > len(self._gathered):
            self._gathered = self._gathered.new_empty(len(rows), self._gathered.shape[1])
        out = self._gathered[: len(rows)]
        return torch.index_select(cache.view(-1, out.shape[1]), 0, rows, out=out)

    def _attend_all(self, q_TX: Tensor, cache: Tensor, pages: AllPages) -> Tensor:
        kv, width = self._spec.kv_heads, self._spec.head_dim
        n, _, _, seen = pages.bias.shape
        k, v = self._gather(cache, pages.rows).view(2, n, kv, seen, width)
        return F.scaled_dot_product_attention(q_TX.view(n, kv, -1, width), k, v, attn_mask=pages.bias).view(n, -1)

    def _attend(self, q_TX: Tensor, cache: Tensor, part: Part, mixed: Mixed) -> None:
        kv, group, width = self._spec.kv_heads, self._spec.query_group, self._spec.head_dim
        n, _, _, seen = part.bias.shape
        q_MX = q_TX if part.tokens is None else q_TX.index_select(0, part.tokens)
        q = q_MX.view(-1, kv, group * width).transpose(0, 1).reshape(kv * n, -1, width)
        k, v = self._gather(cache, part.rows).view(2, kv * n, seen, width)
        products = torch.bmm(q, k.transpose(1, 2)).view(kv, n, -1, group, seen)
        scores = torch.add(part.bias, products, alpha=width**-0.5)
        peak, held = scores.amax(-1), mixed.peak(part.tokens)
        if held is not None:
            peak = torch.maximum(peak, held.view(-1, kv, group).transpose(0, 1).reshape(peak.shape))
        weights = _weights(scores, peak)
        out = torch.bmm(weights.view(kv * n, -1, seen).to(self.dtype), v).view(kv, -1, group, width)

        def by_token(x: Tensor) -> Tensor:  # [kv, tokens, group, *] -> [kept, heads, *]
            x = x.transpose(0, 1).flatten(1, 2)
            return x if part.kept is None else x.index_select(0, part.kept)

        tokens = None if part.whole else part.tokens
        if tokens is not None and part.kept is not None:
            tokens = tokens.index_select(0, part.kept)
        peak, total = (by_token(x.view(kv, -1, group)) for x in (peak, weights.sum(-1)))
        mixed.add(tokens, peak, total, by_token(out))

    def _attend_pages(self, q_TX: Tensor, cache: Tensor, pages: OwnPages, mixed: Mixed) -> None:
        heads, group, width = self._spec.heads, self._spec.query_group, self._spec.head_dim
        places = pages.places
        if isinstance(places, slice):
            k, v = cache[:, places]
        else:
            k, v = self._gather(cache, places).view(2, -1, self._spec.kv_heads, PAGE, width)
        q = q_TX.index_select(0, pages.owner).view(-1, group, width)
        products = torch.bmm(q, k.view(-1, PAGE, width).transpose(1, 2)).view(len(k), -1, group, PAGE)
        scores = torch.add(pages.bias, products, alpha=width**-0.5).view(len(k), heads, PAGE)
        peak = scores.amax(-1).index_select(0, pages.padded).view(len(pages.starts), -1, heads).amax(1)
        held = mixed.peak(pages.tokens)
        if held is not None:
            peak = torch.maximum(peak, held)
        weights = _weights(scores, peak.index_select(0, pages.rank))
        out = torch.bmm(weights.view(-1, group, PAGE).to(self.dtype), v.view(-1, PAGE, width)).view(len(k), -1)
        out, total = (F.embedding_bag(pages.table, x, pages.starts, mode="sum") for x in (out, weights.sum(-1)))
        mixed.add(pages.tokens, peak, total, out.view(-1, heads, width))

    def _all_pages(self, step: Step) -> AllPages | None:
        """None: where that would be too many, or some tokens see others of the step."""
        group = np.repeat(np.arange(len(step.group_start) - 1), np.diff(step.group_start))
        seen = np.where(step.member_writes > 0, step.own_before + 1, 0)
        shared, own = np.diff(step.shared_start)[group], -(-seen // PAGE)
        shape = (len(seen), int((shared + own).max()))
        if len(step.ids) > len(seen) or math.prod(shape) * math.prod(self._kv_shape(1)[1:]) > _FEW_KEYS:
            return None
        table, counts = np.zeros((2, *shape), dtype=np.int64)
        member, within = _token_places(np.arange(len(seen)), shared)
        where = step.shared_start[group[member]] + within
        table[member, within], counts[member, within] = step.shared_ids[where], step.shared_counts[where]
        member, within = _token_places(np.arange(len(seen)), own)
        where = shared[member] + within
        table[member, where] = step.own_table[step.member_row[member], within]
        counts[member, where] = np.minimum(seen[member] - within * PAGE, PAGE)
        shown = (np.arange(PAGE) < counts[..., None]).reshape(len(seen), 1, 1, -1)
        return AllPages(self._rows(table), self._bias(shown).to(self.dtype))

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
            counted = np.diff(ends)[some]
            yield self._part(ends[some], counted, table, seen.reshape(len(some), 1, -1), len(step.ids))

    def _own(self, step: Step) -> Iterator[Part]:
        """The tokens of each member that has several over its own pages, up to themselves."""
        several = (step.member_writes > 0) & (step.member_count > 1)
        pages = -(-np.where(several, step.own_before + step.member_count, 0) // PAGE)
        for some in _alike(step.member_count, pages, self._spec.heads):
            counts, width = step.member_count[some], int(pages[some].max())
            places = np.minimum(np.arange(counts.max()), counts[:, None] - 1) + step.own_before[some, None]
            shown = np.arange(width * PAGE) <= places[..., None]
            table = step.own_table[step.member_row[some], :width].astype(np.int64)
            table[np.arange(width) >= pages[some, None]] = 0  # what lies beyond is of an earlier user
            yield self._part(step.member_start[some], counts, table, shown, len(step.ids))

    def _own_pages(self, step: Step) -> OwnPages | None:
        """Own pages of the members that have one token."""
        single = np.flatnonzero((step.member_writes > 0) & (step.member_count == 1))
        if not len(single):
            return None
        seen = step.own_before[single] + 1
        counts = -(-seen // PAGE)
        owner = np.repeat(np.arange(len(single)), counts)
        starts = np.cumsum(counts) - counts
        within = np.arange(len(owner)) - np.repeat(starts, counts)
        used = step.own_table[step.member_row[single][owner], within].astype(np.int64)
        first, size = int(used.min()), int(used.max() - used.min()) + 1
        scattered = size > _DENSE * len(used)
        local = np.arange(len(used)) if scattered else used - first
        token, shown = np.zeros((2, len(used) if scattered else size), dtype=np.int64)
        token[local], shown[local] = step.member_start[single][owner], np.minimum(seen[owner] - within * PAGE, PAGE)
        rank = np.zeros_like(token)
        rank[local] = owner
        padded = starts[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        all_of_them = len(single) == len(step.ids)
        return OwnPages(
            places=self._rows(used[:, None]) if scattered else slice(first, first + size),
            owner=self._tensor(token),
            bias=self._bias((np.arange(PAGE) < shown[:, None]) | (shown == 0)[:, None])[:, None, None],
            tokens=None if all_of_them else self._tensor(step.member_start[single]),
            rank=self._tensor(rank),
            table=self._tensor(local),
            starts=self._tensor(starts),
            padded=self._tensor(local[padded].ravel()),
        )

    def _part(self, starts: np.ndarray, counts: np.ndarray, table: np.ndarray, seen: np.ndarray, total: int) -> Part:
        """`total`: tokens of the step."""
        width = int(counts.max())
        places = np.minimum(np.arange(width), counts[:, None] - 1)
        real = np.arange(width) < counts[:, None]
        tokens, everything = (starts[:, None] + places).ravel(), np.arange(total)
        return Part(
            tokens=None if np.array_equal(tokens, everything) else self._tensor(tokens),
            kept=None if real.all() else self._tensor(np.flatnonzero(real)),
            whole=np.array_equal(tokens[real.ravel()], everything),
            rows=self._rows(table.reshape(1, -1)),
            bias=self._bias(seen)[:, :, None],
        )

    def _rows(self, pages: np.ndarray) -> Tensor:
        """[lists, P] pages: their rows [2 * lists * kv_heads * P] in a layer's cache, PAGE keys or values each."""
        heads = self._spec.kv_heads
        rows = (pages[:, None] * heads + np.arange(heads)[:, None]).ravel()
        return self._tensor(np.concatenate([rows, rows + self._kv.shape[2] * heads]))

    def _writes(self, step: Step, owner: np.ndarray, within: np.ndarray) -> tuple[Tensor | None, Tensor]:
        """Tokens whose KV is written (None: all) and its rows in [2 * pages * kv_heads * PAGE], keys first."""
        writing = step.member_writes[owner] > 0
        at = (step.own_before[owner] + within)[writing]
        pages = step.own_table[step.member_row[owner][writing], at // PAGE].astype(np.int64)
        self._grow(int(step.own_table.max()))
        heads = self._spec.kv_heads
        rows = (pages[:, None] * heads + np.arange(heads)) * PAGE + (at % PAGE)[:, None]
        rows = np.concatenate([rows, rows + self._kv.shape[2] * heads * PAGE], axis=1)
        return None if writing.all() else self._tensor(np.flatnonzero(writing)), self._tensor(rows.ravel())

    def _empty_cache(self) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(self._kv_shape(min(self._capacity, _FIRST_PAGES)), device=self._device, dtype=self.dtype)
        shape = self._kv_shape(self._capacity)
        n_bytes = math.prod(shape) * self.dtype.itemsize
        try:
            return huge_pages(n_bytes)[:n_bytes].view(self.dtype).view(shape)
        except OSError as error:
            raise MemoryError(f"no memory for {self._capacity - 1} KV pages: {error}") from error

    def _grow(self, page: int) -> None:
        held = self._kv.shape[2]
        if page >= held:
            extra = min(self._capacity, max(page + 1, 2 * held)) - held
            self._kv = torch.cat([self._kv, self._kv.new_zeros(self._kv_shape(extra))], dim=2)

    def _bias(self, seen: np.ndarray) -> Tensor:
        return torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), -torch.inf).to(self._device)

    def _kv_shape(self, pages: int) -> tuple[int, ...]:
        return (self._spec.layers, 2, pages, self._spec.kv_heads, PAGE, self._spec.head_dim)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)


def _token_places(pages: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Page of each token, and its place in it."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(pages, counts), within


def _weights(scores: Tensor, peak: Tensor) -> Tensor:
    """exp(score - peak), in place."""
    return scores.sub_(peak[..., None]).clamp_min_(_LEAST).exp_()


def _alike(tokens: np.ndarray, pages: np.ndarray, heads: int) -> Iterator[np.ndarray]:
    """Indices with pages, in lots that waste at most half on padding and stay within the scores held at once; in one
    lot where that is small."""
    some = np.flatnonzero(pages > 0)
    if len(some) * heads * int(tokens.max(initial=0)) * int(pages.max(initial=0)) * PAGE <= _FEW_SCORES:
        yield from [some] if len(some) else []
        return
    kinds = np.stack([np.frexp(tokens - 0.5)[1], np.frexp(pages - 0.5)[1]])  # powers of two that are not exceeded
    for kind in np.unique(kinds[:, pages > 0], axis=1).T:
        lot = np.flatnonzero((kinds == kind[:, None]).all(axis=0) & (pages > 0))
        scores = len(lot) * heads * int(tokens[lot].max()) * int(pages[lot].max()) * PAGE
        yield from np.array_split(lot, min(len(lot), -(-scores // _MAX_SCORES)))

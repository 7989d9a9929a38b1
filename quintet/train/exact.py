"""The decoder as the reproducible engine computes it, differentiable: `mismatch/max_abs_logprob` is then exactly 0.

Every row goes through the same kernels (`models/decoder/numerics.py`) in the same blocks: matrix products on the
settled numbers of rows, keys of a sample in blocks from its first position on, a shared prompt's before its own. Which
rows stand side by side does not matter to these kernels, so micro-batches, order and packing do not either.

Left out: LoRA's dropout (adapters are merged, as they are for the engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quintet.models.decoder.forward import RopeTable, decoder_layer, rms_norm
from quintet.models.decoder.numerics import Kernels, ReproducibleKernels, reproducible_kernels, settle_row_counts
from quintet.models.decoder.spec import ModelSpec, read_spec
from quintet.models.decoder.weights import EMBEDDING, HEAD, NORM, joined_layer
from quintet.models.lora import PlainWeights, base_model
from quintet.train.head import HeadWeights
from quintet.train.packing import AttentionBucket, PackedRow

_MAX_SCORES = 2**24  # attention scores of one call
_MAX_QUERIES = 512  # tokens of a sample whose queries are computed at once: they see no key behind the last of them


def trainer_kernels(model: nn.Module, page_size: int) -> ReproducibleKernels:
    """The kernels of an engine with `rollout.page_size` over the same weights.

    Raises QuintetError for weights that are not float32, an architecture that the engine does not know, and a machine
    on which the bits cannot be kept.
    """
    weights, spec = PlainWeights(model), read_spec(base_model(model).config)
    kernels = reproducible_kernels(page_size, weights[EMBEDDING].dtype)
    head = weights[EMBEDDING if spec.tied else HEAD]
    settle_row_counts(kernels, [*joined_layer(weights, 0).products, head], spec.head_dim)
    return kernels


class ExactDecoder:
    """`model`'s hidden states by `kernels`. `recompute`: keep only each layer's input for the backward pass."""

    def __init__(self, model: nn.Module, kernels: Kernels, *, recompute: bool = False) -> None:
        self._weights = PlainWeights(model)
        self._spec = read_spec(base_model(model).config)
        self._kernels, self._recompute = kernels, recompute
        embedding = self._weights[EMBEDDING]
        self._rope = RopeTable(self._spec.inv_freq, self._spec.rope_scale, embedding.device, embedding.dtype)

    @property
    def head(self) -> HeadWeights:
        return HeadWeights(self._weights[EMBEDDING if self._spec.tied else HEAD], None)

    def hidden(self, row: PackedRow, rows_N: Tensor) -> Tensor:
        """The last hidden states [N, D] of some of the row's T tokens."""
        pad = -row.input_ids_1T.shape[1] % self._kernels.row_tile
        ids_T, positions_T = (F.pad(x[0], (0, pad)) for x in (row.input_ids_1T, row.position_ids_1T))
        rope = self._rope.rows(positions_T, int(positions_T.max()))
        attention = _RowAttention(self._spec, self._kernels, row, pad)

        def layer(x_TE: Tensor, index: int) -> Tensor:
            return decoder_layer(self._spec, self._kernels, joined_layer(self._weights, index), x_TE, rope, attention)

        x_TE = F.embedding(ids_T, self._weights[EMBEDDING])
        for index in range(self._spec.layers):
            x_TE = checkpoint(layer, x_TE, index, use_reentrant=False) if self._recompute else layer(x_TE, index)
        return rms_norm(x_TE[rows_N], self._weights[NORM], self._spec.norm_eps)


@dataclass(frozen=True)
class _Tile:
    """S samples' queries [S, Q] over their keys [S, K]: rows of the packed row; `bias` as `Kernels.attend` takes it."""

    query_rows: Tensor
    key_rows: Tensor
    bias: Tensor


class _RowAttention:
    """`decoder_layer`'s attention over a packed row of T tokens and `pad` more."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, row: PackedRow, pad: int) -> None:
        self._spec, self._kernels = spec, kernels
        self._tiles: list[_Tile] = []
        places: list[Tensor] = []
        offset = 0
        for bucket in row.buckets:
            samples, queries = bucket.query_rows_NQ.shape
            place_NQ = torch.arange(samples * queries).view(samples, queries) + offset
            offset += samples * queries
            for part, span in self._cuts(bucket):
                self._tiles.append(self._tile(bucket, part, span))
                places.append(place_NQ[part, span].flatten())
        order = torch.cat(places).argsort().to(row.restore_T.device)
        self._restore_T = F.pad(order[row.restore_T], (0, pad))

    def __call__(self, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
        return torch.cat([self._attend(tile, q_THD, k_TJD, v_TJD) for tile in self._tiles])[self._restore_T]

    def _cuts(self, bucket: AttentionBucket) -> Sequence[tuple[slice, slice]]:
        """Runs of samples and of their queries whose scores stay within the limit."""
        samples, queries = bucket.query_rows_NQ.shape
        cuts = []
        for at in range(0, queries, _MAX_QUERIES):
            span = slice(at, min(at + _MAX_QUERIES, queries))
            keys = bucket.key_rows_NK.shape[1] - queries + span.stop
            step = max(1, _MAX_SCORES // (self._spec.heads * (span.stop - span.start) * keys))
            cuts += [(slice(first, min(first + step, samples)), span) for first in range(0, samples, step)]
        return cuts

    def _tile(self, bucket: AttentionBucket, part: slice, span: slice) -> _Tile:
        prefix = bucket.key_rows_NK.shape[1] - bucket.query_rows_NQ.shape[1]
        rows = self._by_head(
            torch.arange(span.start, span.stop)[None, :, None, None].expand(1, -1, self._spec.heads, 1)
        )
        seen_R = rows[0, :, 0] + prefix + 1
        keys = -(-(prefix + span.stop) // self._kernels.key_block) * self._kernels.key_block
        hidden_RK = torch.arange(keys) >= seen_R[:, None]
        bias_RK = torch.zeros(hidden_RK.shape).masked_fill_(hidden_RK, -torch.inf)
        query_rows = bucket.query_rows_NQ[part, span]
        return _Tile(
            query_rows, bucket.key_rows_NK[part, : prefix + span.stop], bias_RK[None, None].to(query_rows.device)
        )

    def _by_head(self, states_SQHD: Tensor) -> Tensor:
        """[S x KV heads, R, D]: the rows of a KV head are (token, query head), padded to the kernels' tile."""
        samples, tokens, heads, width = states_SQHD.shape
        group = heads // self._spec.kv_heads
        by_head = states_SQHD.reshape(samples, tokens, self._spec.kv_heads, group, width).transpose(1, 2)
        rows = by_head.reshape(samples * self._spec.kv_heads, tokens * group, width)
        return F.pad(rows, (0, 0, 0, -rows.shape[1] % self._kernels.row_tile))

    def _attend(self, tile: _Tile, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
        """[S * Q, heads * head_dim]."""
        spec, (samples, tokens) = self._spec, tile.query_rows.shape
        keys, values = (x[tile.key_rows].transpose(1, 2).flatten(0, 1) for x in (k_TJD, v_TJD))
        out = self._kernels.attend(self._by_head(q_THD[tile.query_rows]), keys, values, tile.bias)
        out = out[:, : tokens * spec.query_group].reshape(samples, spec.kv_heads, tokens, spec.query_group, -1)
        return out.transpose(1, 2).reshape(samples * tokens, spec.heads * spec.head_dim)

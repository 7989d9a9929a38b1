"""Keyed sampling: which token a row of logits gives depends on the row and on the sample's key alone.

The draw at a position is `hash(key, position)` with `key = blake2b(seed, group id, sample index)`, turned into a
token by inverting the cumulative distribution in vocabulary order. The search has two levels, sums over blocks of
256 entries and then the entries of one block, so that the vocabulary is neither sorted nor scanned in float64.
Truncation is a threshold on the probabilities (entries tied with the last kept one are kept too), so that its
result does not depend on how a sort orders ties.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.models.decoder.mass import BLOCK, block_sums, log_share
from quintet.types import GroupId

_AT_ONCE = 2**19  # logits; a processor's cache holds them and what is made of them
_NUCLEUS_GUESS = 1024  # top-p first looks at this many largest probabilities; rows that need more are sorted


def sequence_key(seed: int, group_id: GroupId, sample_index: int) -> int:
    """64-bit key of one sample's randomness, the same in every process and batch."""
    text = f"{seed}|{group_id}|{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def keyed_uniform(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """One uniform float64 in [0, 1) per (key, position): SplitMix64's finaliser over a Weyl sequence.

    Args:
        keys_B: uint64 keys from `sequence_key`. positions_B: index of the token in its response, from 0.
    """
    weyl = np.uint64(0x9E3779B97F4A7C15)
    z = keys_B.astype(np.uint64) + (positions_B.astype(np.uint64) + np.uint64(1)) * weyl
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class SamplingRows:
    """Per-row settings of one sampling call, all of length B. `temperature` 0: greedy."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray

    def part(self, rows: slice) -> SamplingRows:
        return SamplingRows(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def sample(logits_BV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Returns:
        ids_B (int64) and logprobs_B (float32): the log-probability under the distribution that was sampled from,
        temperature and truncation included and renormalised. A greedy row reports the untruncated log-probability at
        temperature 1 (its own distribution is a point mass, which would say nothing). A row with a NaN or infinite
        logit gives a NaN log-probability, which the caller must check.
    """
    count, vocabulary = logits_BV.shape
    lot = max(1, _AT_ONCE // vocabulary) if logits_BV.device.type == "cpu" else max(1, count)
    found = [
        _sample_lot(logits_BV[at : at + lot].float(), rows.part(slice(at, at + lot)))
        for at in range(0, max(1, count), lot)
    ]
    ids, logprobs = zip(*found, strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _sample_lot(logits_BV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    device = logits_BV.device
    greedy = rows.temperature == 0.0
    scale = np.where(greedy, 1.0, rows.temperature)
    scaled_BV = logits_BV
    if np.any(scale != 1.0):
        scaled_BV = logits_BV / torch.from_numpy(scale.astype(np.float32)).to(device)[:, None]
    peak_B1 = scaled_BV.amax(-1, keepdim=True)
    mass_BV = _truncate((scaled_BV - peak_B1).exp_(), scaled_BV, rows, ~greedy)
    cumulative_BN = (sums_BN := block_sums(mass_BV)).cumsum(-1)
    ids_B = _invert_cdf(mass_BV, sums_BN, cumulative_BN, torch.from_numpy(rows.uniform).to(device))
    if greedy.any():
        ids_B = torch.where(torch.from_numpy(greedy).to(device), logits_BV.argmax(-1), ids_B)
    return ids_B, log_share((scaled_BV.gather(1, ids_B[:, None]) - peak_B1).squeeze(1), cumulative_BN)


def _invert_cdf(mass_BV: Tensor, sums_BN: Tensor, cumulative_BN: Tensor, uniform_B: Tensor) -> Tensor:
    """Smallest index whose cumulative mass exceeds `uniform * total`. `sums_BN`: `block_sums` of the mass."""
    rows, vocabulary = mass_BV.shape
    if vocabulary % BLOCK:
        mass_BV = F.pad(mass_BV, (0, BLOCK - vocabulary % BLOCK))
    blocks_BNK = mass_BV.view(rows, -1, BLOCK)
    target_B = uniform_B * cumulative_BN[:, -1]
    block_B = _first_above(cumulative_BN, target_B, sums_BN > 0)
    below_B = (cumulative_BN.gather(1, block_B[:, None]) - sums_BN.gather(1, block_B[:, None])).squeeze(1)
    share_B = (target_B - below_B).clamp_min(0.0) / sums_BN.gather(1, block_B[:, None]).squeeze(1)
    inner_BK = blocks_BNK[torch.arange(rows, device=mass_BV.device), block_B].double()
    inner_cumulative_BK = inner_BK.cumsum(-1)
    offset_B = _first_above(inner_cumulative_BK, share_B * inner_cumulative_BK[:, -1], inner_BK > 0)
    return block_B * BLOCK + offset_B


def _first_above(cumulative_BN: Tensor, target_B: Tensor, positive_BN: Tensor) -> Tensor:
    """Index of the first cumulative value above the target, never past the last entry with mass (rounding)."""
    found_B = torch.searchsorted(cumulative_BN, target_B[:, None], right=True).squeeze(1)
    places_N = torch.arange(cumulative_BN.shape[1], device=cumulative_BN.device)
    return torch.minimum(found_B, (positive_BN * places_N).amax(-1))


def _truncate(mass_BV: Tensor, scaled_BV: Tensor, rows: SamplingRows, sampled: np.ndarray) -> Tensor:
    """Zero the mass outside top-k, then outside top-p of what is left, then below min-p of the likeliest (whose mass
    is 1). Only rows that ask for it are touched."""
    vocabulary = mass_BV.shape[1]
    with_k = np.flatnonzero(sampled & (rows.top_k > 0) & (rows.top_k < vocabulary))
    if with_k.size:
        index = torch.from_numpy(with_k).to(mass_BV.device)
        k_R = torch.from_numpy(rows.top_k[with_k].astype(np.int64)).to(mass_BV.device)
        part_RV = scaled_BV[index]
        largest_RK = part_RV.topk(int(k_R.max()), dim=-1).values
        keep_RV = part_RV >= largest_RK.gather(1, k_R[:, None] - 1)
        mass_BV[index] = mass_BV[index] * keep_RV
    with_p = np.flatnonzero(sampled & (rows.top_p < 1.0))
    if with_p.size:
        index = torch.from_numpy(with_p).to(mass_BV.device)
        top_p_R = torch.from_numpy(rows.top_p[with_p].astype(np.float64)).to(mass_BV.device)
        part_RV = mass_BV[index]
        mass_BV[index] = part_RV * (part_RV >= _nucleus_threshold(part_RV, top_p_R))
    with_min = np.flatnonzero(sampled & (rows.min_p > 0.0))
    if with_min.size:
        index = torch.from_numpy(with_min).to(mass_BV.device)
        least_R1 = torch.from_numpy(rows.min_p[with_min].astype(np.float32)).to(mass_BV.device)[:, None]
        mass_BV[index] = mass_BV[index] * (mass_BV[index] >= least_R1)
    return mass_BV


def _nucleus_threshold(mass_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Smallest mass kept, [R, 1]: a token is kept while the mass of the more likely ones is below top_p."""
    wanted_R = top_p_R * mass_RV.sum(-1, dtype=torch.float64)
    width = min(_NUCLEUS_GUESS, mass_RV.shape[1])
    threshold_R, reached_R = _threshold_in(mass_RV.topk(width, dim=-1).values, wanted_R)
    if not bool(reached_R.all()):
        rest = (~reached_R).nonzero().squeeze(1)
        ordered = mass_RV[rest].sort(dim=-1, descending=True).values
        threshold_R[rest] = _threshold_in(ordered, wanted_R[rest])[0]
    return threshold_R[:, None]


def _threshold_in(ordered_RK: Tensor, wanted_R: Tensor) -> tuple[Tensor, Tensor]:
    cumulative_RK = ordered_RK.double().cumsum(-1)
    before_RK = cumulative_RK - ordered_RK.double()
    kept_R = (before_RK < wanted_R[:, None]).sum(-1).clamp_min(1)
    return ordered_RK.gather(1, kept_R[:, None] - 1).squeeze(1), cumulative_RK[:, -1] >= wanted_R

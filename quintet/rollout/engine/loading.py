"""Weights into storage that exists already: checked wholly, then copied, so that an update is whole or not at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from quintet.types import QuintetError


def check_weights(
    shapes: Mapping[str, tuple[int, ...]], tied: Iterable[Collection[str]], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors that are to be loaded, by name.

    Args:
        shapes: what the model has. tied: names that share storage; one of them is needed, and given more than one,
            they must be equal.

    Raises QuintetError on names missing or unknown, on another shape, on values that are not finite.
    """
    given = {name: weights[name] for name in weights if not name.endswith("rotary_emb.inv_freq")}
    unknown = sorted(set(given) - set(shapes))
    if unknown:
        raise _refusal(f"unknown tensor {unknown[0]!r}", len(unknown) - 1)
    together = {name: names for names in tied for name in names}
    missing = sorted({min(together.get(n, (n,))) for n in shapes if not given.keys() & set(together.get(n, (n,)))})
    if missing:
        raise _refusal(f"tensor {missing[0]!r} is missing", len(missing) - 1)
    for name, tensor in given.items():
        _check_tensor(name, tensor, shapes[name])
    for names in {tuple(names) for names in together.values()}:
        _check_tied([name for name in names if name in given], given)
    return given


@torch.no_grad()
def load_weights(targets: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into `targets`, converting dtype and device. Names that share storage among the targets are tied.

    Raises QuintetError, before anything was changed, as `check_weights` does.
    """
    by_storage = defaultdict(list)
    for name, target in targets.items():
        by_storage[(target.data_ptr(), tuple(target.shape))].append(name)
    tied = [names for names in by_storage.values() if len(names) > 1]
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    for name, tensor in check_weights(shapes, tied, weights).items():
        targets[name].copy_(tensor)


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise _refusal(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model's is {shape}")
    if tensor.is_floating_point() and not all(bool(bound.isfinite()) for bound in torch.aminmax(tensor)):
        raise _refusal(f"tensor {name!r} has values that are not finite")


def _check_tied(names: list[str], given: Mapping[str, Tensor]) -> None:
    for name in names[1:]:
        first, other = given[names[0]], given[name]
        if first.data_ptr() != other.data_ptr() and not torch.equal(first, other):
            raise _refusal(f"{names[0]!r} and {name!r} are tied in the model's config but differ")


def _refusal(what: str, more: int = 0) -> QuintetError:
    rest = f" (and {more} more)" if more > 0 else ""
    return QuintetError(
        f"Weights refused: {what}{rest}. The engine keeps the version it has.\n"
        "They must be the model's own Hugging Face state dict, LoRA merged."
    )

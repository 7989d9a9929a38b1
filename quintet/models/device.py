"""Device and compute dtype by configuration, and random numbers that do not leak into global state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quintet.types import QuintetError


def resolve_device(name: str) -> torch.device:
    """`auto` (cuda where there is one, else cpu), `cpu`, `cuda` or `cuda:N` as a device.

    Raises QuintetError for an unknown name and for a CUDA device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise QuintetError(f"model.device: {name!r} is no device. Use auto, cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise QuintetError(f"model.device: {name!r} is not supported. Use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise QuintetError(
            f"model.device: {name!r} was asked for, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices here.\n"
            "Use model.device=auto or cpu, or install a CUDA build of torch."
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Compute dtype: `float32`, `bfloat16`, or `auto` = bfloat16 where `device` computes it in hardware, else float32.

    Raises QuintetError for any other name.
    """
    if name == "auto":
        return torch.bfloat16 if _has_bfloat16(device) else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise QuintetError(f"model.dtype: {name!r} is unknown. Use auto, float32 or bfloat16.")
    return dtypes[name]


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """torch's default generators start from `seed` inside the block and are put back after it."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield

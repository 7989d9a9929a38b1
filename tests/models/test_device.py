"""Device and dtype by name."""

from __future__ import annotations

import pytest
import torch

from quintet.models.device import resolve_device, resolve_dtype, seeded
from quintet.types import QuintetError

CPU = torch.device("cpu")


def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU


def test_cuda_index_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(QuintetError, match="sees 1 CUDA devices"):
        resolve_device("cuda:1")


@pytest.mark.parametrize(("name", "message"), [("gpu", "is no device"), ("meta", "is not supported")])
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(QuintetError, match=message):
        resolve_device(name)


@pytest.mark.parametrize(("has_it", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_is_bfloat16_only_in_hardware(
    monkeypatch: pytest.MonkeyPatch, has_it: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": has_it})
    assert resolve_dtype("auto", CPU) == expected


def test_named_dtypes() -> None:
    assert [resolve_dtype(name, CPU) for name in ("float32", "bfloat16")] == [torch.float32, torch.bfloat16]
    with pytest.raises(QuintetError, match=r"'float16' is unknown"):
        resolve_dtype("float16", CPU)


def test_seeded_restores_the_generator() -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    with seeded(7):
        first = torch.rand(3)
    with seeded(7):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.random.get_rng_state(), state)

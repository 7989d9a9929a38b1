"""Building and choosing the C++ kernels: once per machine, never half, and said why where they cannot run."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from quintet.models.decoder.spec import read_spec
from quintet.models.native.compile import NativeUnavailable
from quintet.models.native.unit import Unit
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.build import choose_model
from quintet.rollout.engine.members import Extra, Prompt, extra_step
from quintet.rollout.engine.native.library import load_library
from quintet.rollout.engine.native.model import NativeModel
from quintet.rollout.engine.slots import Slots
from quintet.types import QuintetError
from tests.rollout.small_models import make_engine, make_model

MODEL = make_model()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A stand-in that takes half a second and hands out the real kernels; its calls are the lines of a file."""
    real = load_library().path
    calls = tmp_path / "calls"
    calls.touch()
    script = tmp_path / "c++"
    script.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && { echo stand-in; exit; }\n'
        f"echo call >> {calls}\n"
        "sleep 0.5\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'cp {real} "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return calls


def test_the_kernels_are_built_once_however_many_ask_at_the_same_time(compiler, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(load_library, [tmp_path / "cache"] * 3))
    assert len({library.path for library in found}) == 1
    load_library(tmp_path / "cache")
    assert compiler.read_text() == "call\n"
    left = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert left == [".lock", ".so"]


def test_a_failing_compiler_leaves_nothing_and_its_error_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeUnavailable, match="false failed"):
        load_library(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_without_a_compiler_auto_takes_torch_and_says_so_and_native_is_refused(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, "quintet"):
        engine = make_engine(MODEL)
    assert engine.model.path.startswith("torch")
    assert "no C++ compiler 'no-such-compiler'" in caplog.text
    with pytest.raises(QuintetError, match=r"rollout\.kernels: native cannot run here: there is no C\+\+ compiler"):
        make_engine(MODEL, kernels="native")


def test_native_is_refused_off_the_cpu():
    with pytest.raises(QuintetError, match=r"model\.device is meta"):
        choose_model(read_spec(MODEL.config), RolloutConfig(kernels="native"), torch.device("meta"), torch.float32)


@pytest.mark.parametrize("size", [1.0, 1e5, 1e-5], ids=["", "large", "small"])
@pytest.mark.parametrize("unit", Unit)
def test_bf16_products_agree_with_float32_on_every_unit(unit, size):
    """Also of numbers beyond the range of fp16, between the two layers of the MLP."""
    library = load_library()
    if not library.has(unit):
        pytest.skip("not on this processor")
    model, ids = make_model("llama-3-heads-per-kv"), torch.arange(2, 72)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data *= size
        layer.mlp.down_proj.weight.data /= size
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        native = NativeModel(library, read_spec(model.config), dtype, pages=4, threads=2, unit=unit)
        rounded = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
        native.load(rounded)
        found[dtype] = native.logits(_prompt_step(ids.tolist()))
    off = (found[torch.bfloat16] - found[torch.float32]).abs()
    assert 0 < off.mean() < 0.1 * found[torch.float32].std()


@pytest.mark.parametrize(("part", "undone"), [("k_proj", "q_proj"), ("v_proj", "o_proj")])
@pytest.mark.parametrize(("size", "fits"), [(100.0, True), (1e9, False)])
@pytest.mark.parametrize("unit", Unit)
def test_keys_and_values_that_fp16_cannot_hold_are_never_taken_for_others(unit, size, fits, part, undone):
    library = load_library()
    if not library.has(unit):
        pytest.skip("not on this processor")
    model, found = make_model("llama-3-heads-per-kv"), {}
    for layer in model.model.layers:
        getattr(layer.self_attn, part).weight.data *= size
        getattr(layer.self_attn, undone).weight.data /= size
    for dtype in (torch.float32, torch.bfloat16):
        native = NativeModel(library, read_spec(model.config), dtype, pages=4, threads=2, unit=unit)
        native.load({name: weight.bfloat16() for name, weight in model.state_dict().items()})
        found[dtype] = native.logits(_prompt_step(list(range(2, 72))))
    if unit is Unit.HALVES and not fits:
        assert found[torch.bfloat16].isnan().all()
    else:
        off = (found[torch.bfloat16] - found[torch.float32]).abs()
        assert off.mean() < 0.1 * found[torch.float32].std()


@pytest.mark.parametrize("unit", Unit)
def test_threads_that_write_neighbouring_tokens_of_a_page_lose_nothing(unit):
    library = load_library()
    if not library.has(unit):
        pytest.skip("not on this processor")
    model, step, found = make_model("llama-3-heads-per-kv"), _prompt_step(list(range(2, 85))), []
    native = NativeModel(library, read_spec(model.config), torch.bfloat16, pages=4, threads=4, unit=unit)
    native.load({name: weight.bfloat16() for name, weight in model.state_dict().items()})
    for _ in range(60):
        native.clear_pages(np.arange(4))
        found.append(native.logits(step))
    assert all(torch.equal(logits, found[0]) for logits in found)


def _prompt_step(ids):
    prompt = Prompt(1, 1, np.array(ids, dtype=np.int32), [], [1, 2, 3], 0)
    extra = Extra(prompt, None, prompt.ids, 0, np.array([1, 2, 3], dtype=np.int32), 0, True, [])
    return extra_step([extra], Slots(1, 96), every_logit=True)

"""From `rollout.numerics` and `rollout.kernels` to an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from quintet.models.decoder.spec import ModelSpec, read_spec
from quintet.models.native.compile import NativeUnavailable
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.engine import Engine
from quintet.rollout.engine.fast import FastEngine
from quintet.rollout.engine.native.library import Library, load_library
from quintet.rollout.engine.native.model import NativeModel
from quintet.rollout.engine.sequence import Decode
from quintet.rollout.engine.step import StepModel
from quintet.rollout.engine.sync import SyncEngine
from quintet.rollout.engine.torch_model import TorchModel
from quintet.types import QuintetError

_log = logging.getLogger(__name__)


def make_engine(
    hf_config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    *,
    eos_ids: Collection[int],
    decode: Decode,
    config: RolloutConfig,
    device: torch.device,
    dtype: torch.dtype,
    version: int = 0,
    now: Callable[[], float] = time.monotonic,
) -> SyncEngine:
    """The engine of `config.numerics`.

    Args:
        hf_config: decides architecture and sizes; QuintetError if the engine does not know it.
        weights: Hugging Face state dict, LoRA merged.
        eos_ids: each of them ends a sample.
        decode: ids -> text, for stop strings and `Rollout.text`.
    """
    if config.numerics == "reproducible":
        return Engine(
            hf_config,
            weights,
            eos_ids=eos_ids,
            decode=decode,
            config=config,
            device=device,
            dtype=dtype,
            version=version,
            now=now,
        )
    spec = read_spec(hf_config)
    make_model = choose_model(spec, config, device, dtype)
    engine = FastEngine(
        spec, make_model, weights, eos_ids=eos_ids, decode=decode, config=config, version=version, now=now
    )
    _log.info("rollout engine: %s", engine.model.path)
    return engine


def choose_model(
    spec: ModelSpec, config: RolloutConfig, device: torch.device, dtype: torch.dtype
) -> Callable[[int], StepModel]:
    """From a number of KV pages to the model that `rollout.kernels` and the machine allow; the choice is logged.

    Raises QuintetError where `native` is asked for and impossible.
    """
    if config.kernels != "torch":
        try:
            library = _native(device, dtype)
        except NativeUnavailable as reason:
            if config.kernels == "native":
                raise QuintetError(
                    f"rollout.kernels: native cannot run here: {reason}.\nSet rollout.kernels: auto or torch."
                ) from reason
            if device.type == "cpu":
                _log.warning("rollout engine: the slower torch path runs, because %s", reason)
        else:
            threads = torch.get_num_threads()
            return lambda pages: NativeModel(library, spec, dtype, pages=pages, threads=threads)
    return lambda pages: TorchModel(spec, device, dtype, pages=pages)


def _native(device: torch.device, dtype: torch.dtype) -> Library:
    if device.type != "cpu":
        raise NativeUnavailable(f"the kernels compute on the CPU, model.device is {device.type}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise NativeUnavailable(f"the kernels compute float32 and bfloat16, not {dtype}")
    library = load_library()
    if dtype == torch.bfloat16 and not library.bf16:
        raise NativeUnavailable("this processor has no bfloat16 products (AVX-512 bf16)")
    return library

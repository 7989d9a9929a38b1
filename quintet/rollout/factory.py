"""From `rollout.engine` to a worker. Wrong values are refused before anything heavy is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.protocols import RolloutWorker
from quintet.rollout.config import RolloutConfig, ServedEngineConfig
from quintet.rollout.router import LoadBalancer, make_strategy
from quintet.types import (
    Group,
    GroupId,
    Health,
    QuintetError,
    Rollout,
    SampledToken,
    SamplingParams,
    WeightRef,
    expand_versions,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig

_METHODS = ("generate", "update_weights", "health_check", "abort")
_REPRODUCIBLE_ONLY = ("page_size",)
_FAST_ONLY = ("kernels", "prefix_cache_pages")
_EMBEDDED_ONLY = (*_REPRODUCIBLE_ONLY, *_FAST_ONLY, "kv_pages", "prefill_tokens")
_HTTP_ONLY = ("urls", "prefill_urls", "router", "weights_dir")
KEY_VARIABLE = "QUINTET_ROLLOUT_KEY"
_SERVED = {  # engine -> its module, its class, and where an environment with it comes from
    "vllm": ("quintet.rollout.vllm", "VllmRolloutWorker", "vLLM (`make vllm-env` makes one)"),
    "sglang": ("quintet.rollout.sglang", "SglangRolloutWorker", "SGLang"),
    "tensorrt_llm": ("quintet.rollout.tensorrt_llm", "TensorrtLlmRolloutWorker", "TensorRT-LLM"),
}


def check_rollout_config(config: RolloutConfig) -> None:
    """Raises QuintetError for an engine that does not exist or options that it would ignore. Imports no torch."""
    _check_http(config)
    for engine in _SERVED:
        _check_served(config, engine)
    if config.engine == "transformers":
        _check_transformers(config)
    elif config.engine == "embedded":
        _check_numerics(config)
    if config.engine in ("embedded", "transformers", "http", *_SERVED):
        return
    module, _, name = config.engine.partition(":")
    if not module or not name:
        raise QuintetError(
            f"rollout.engine: {config.engine!r} is not an engine.\n"
            "Use embedded, transformers, vllm, sglang, tensorrt_llm, http, or your own class as package.module:Class."
        )
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise QuintetError(f"rollout.engine: {config.engine!r}: there is no module {module!r} on the Python path.")


def _check_http(config: RolloutConfig) -> None:
    if config.engine != "http":
        plain = RolloutConfig()
        idle = [name for name in _HTTP_ONLY if getattr(config, name) != getattr(plain, name)]
        if idle:
            raise QuintetError(f"rollout.{idle[0]} has no effect with rollout.engine: {config.engine}; remove it.")
        return
    if not config.urls:
        raise QuintetError("rollout.urls: engine http needs the servers' URLs, e.g. [http://127.0.0.1:8000].")
    both = {url.rstrip("/") for url in config.urls} & {url.rstrip("/") for url in config.prefill_urls}
    if both:
        raise QuintetError(
            f"rollout.prefill_urls: {min(both)} is among rollout.urls too; a server is one or the other."
        )
    if config.numerics == "reproducible":
        raise QuintetError("rollout.numerics: the servers decide on it; start them with --set rollout.numerics=...")
    make_strategy(config.router)


def _check_served(config: RolloutConfig, engine: str) -> None:
    """Such an engine needs a server or an interpreter; its options do nothing for another engine."""
    options: ServedEngineConfig = getattr(config, engine)
    if config.engine != engine:
        if options != type(options).model_validate({}):
            raise QuintetError(
                f"rollout.{engine} has no effect with rollout.engine: {config.engine}; "
                f"remove it or set engine: {engine}."
            )
        return
    if config.numerics == "reproducible":
        raise QuintetError("rollout.numerics: reproducible is kept by rollout.engine: embedded only; set fast.")
    if options.url is None and options.python is None:
        raise QuintetError(
            f"rollout.engine: {engine} needs a server or an environment that has {_SERVED[engine][2]}.\n"
            f"Set rollout.{engine}.url, or rollout.{engine}.python to the environment's interpreter."
        )
    if options.url is not None and options.python is not None:
        raise QuintetError(f"rollout.{engine}: url and python exclude each other; remove one of them.")
    if options.python is not None and not Path(options.python).is_file():
        raise QuintetError(f"rollout.{engine}.python: there is no file {options.python!r}.")


def check_device(config: RolloutConfig, device: str) -> None:
    """Raises QuintetError for what the run's device (its type) cannot do."""
    if config.engine == "tensorrt_llm" and device != "cuda":
        raise QuintetError(f"rollout.engine: tensorrt_llm runs on NVIDIA GPUs, but the run's device is {device}.")
    if config.engine == "vllm" and config.vllm.sleep and device == "cpu":
        raise QuintetError(
            "rollout.vllm.sleep: vLLM frees memory of GPUs only, but the run's device is cpu; remove it."
        )


def _check_transformers(config: RolloutConfig) -> None:
    if config.numerics == "reproducible":
        raise QuintetError(
            "rollout.numerics: reproducible is kept by rollout.engine: embedded only; set rollout.numerics: fast."
        )
    _check_ignored(config, _EMBEDDED_ONLY, "rollout.engine: transformers")


def _check_numerics(config: RolloutConfig) -> None:
    if config.numerics == "fast":
        _check_ignored(config, _REPRODUCIBLE_ONLY, "rollout.numerics: fast")
    else:
        _check_ignored(config, _FAST_ONLY, "rollout.numerics: reproducible")


def _check_ignored(config: RolloutConfig, names: tuple[str, ...], under: str) -> None:
    defaults = RolloutConfig.model_fields
    ignored = [name for name in names if getattr(config, name) != defaults[name].default]
    if ignored:
        raise QuintetError(f"rollout.{ignored[0]} has no effect with {under}; remove it.")


def make_rollout_worker(
    config: RolloutConfig,
    *,
    hf_config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    eos_ids: Collection[int],
    decode: Callable[[list[int]], str],
    device: torch.device,
    dtype: torch.dtype,
    version: int = 0,
    trust_remote_code: bool = False,
) -> RolloutWorker:
    """The worker that `config.engine` names, loaded with `weights` (a merged Hugging Face state dict).

    A class of the user's own gets `(hf_config, weights, eos_ids=, decode=, config=, device=, dtype=, version=)`, and
    what it returns is checked. Raises QuintetError as `check_rollout_config` does, and as the engine itself does.
    """
    check_rollout_config(config)
    check_device(config, device.type)
    if config.engine == "http":
        return _http_workers(config, weights, eos_ids, decode, version)
    if config.engine == "transformers":
        return _transformers_worker(
            config, hf_config, weights, eos_ids, decode, device, dtype, version, trust_remote_code
        )
    if config.engine == "embedded":
        from quintet.rollout.engine.worker import EmbeddedRolloutWorker

        make: Callable[..., RolloutWorker] = EmbeddedRolloutWorker
    elif config.engine in _SERVED:
        module, name, _ = _SERVED[config.engine]
        make = vars(importlib.import_module(module))[name]
    else:
        make = _load_class(config.engine)
    worker = make(
        hf_config, weights, eos_ids=eos_ids, decode=decode, config=config, device=device, dtype=dtype, version=version
    )
    return worker if config.engine in ("embedded", *_SERVED) else CheckedRolloutWorker(worker, config.engine)


def _transformers_worker(
    config: RolloutConfig,
    hf_config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    eos_ids: Collection[int],
    decode: Callable[[list[int]], str],
    device: torch.device,
    dtype: torch.dtype,
    version: int,
    trust_remote_code: bool,
) -> RolloutWorker:
    from transformers import AutoModelForCausalLM

    from quintet.rollout.engine.loading import load_weights
    from quintet.rollout.transformers_engine import TransformersRolloutWorker

    model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=trust_remote_code).to(device)
    load_weights(model.state_dict(), weights)
    return TransformersRolloutWorker(model, eos_ids=eos_ids, decode=decode, config=config, version=version)


def _http_workers(
    config: RolloutConfig,
    weights: Mapping[str, Tensor],
    eos_ids: Collection[int],
    decode: Callable[[list[int]], str],
    version: int,
) -> RolloutWorker:
    """The servers get `weights` before their first request: what they were started with is another run's business."""
    from quintet.rollout.http import HttpRolloutWorker
    from quintet.rollout.routed import RoutedRolloutWorker
    from quintet.rollout.split import SplitRolloutWorker
    from quintet.weights.file import FileStore
    from quintet.weights.memory import MemoryStore

    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise QuintetError(f"rollout.engine http: put the servers' key into the environment variable {KEY_VARIABLE}.")
    store = MemoryStore() if config.weights_dir is None else FileStore(os.path.abspath(config.weights_dir))
    initial = store.publish(weights, max(version, 0))
    workers = {url: HttpRolloutWorker(url, key=key) for url in config.urls}
    prefills = {url: HttpRolloutWorker(url, key=key) for url in config.prefill_urls}
    balancer = LoadBalancer(make_strategy(config.router))
    if not prefills:
        return RoutedRolloutWorker(workers, balancer, decode=decode, eos_ids=eos_ids, initial=initial, store=store)
    second = LoadBalancer(make_strategy(config.router))
    return SplitRolloutWorker(
        workers, prefills, balancer, second, decode=decode, eos_ids=eos_ids, initial=initial, store=store
    )


def _load_class(path: str) -> Callable[..., RolloutWorker]:
    module, _, name = path.partition(":")
    loaded = importlib.import_module(module)
    if name not in vars(loaded):
        raise QuintetError(f"rollout.engine: {path!r}: module {module!r} has no {name!r}.")
    found = vars(loaded)[name]
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        what = f"lacks {', '.join(missing)}()" if isinstance(found, type) else "is not a class"
        raise QuintetError(f"rollout.engine: {path!r} {what}; see quintet.protocols.RolloutWorker.")
    return found


class CheckedRolloutWorker:
    """Passes everything on to a worker of the user's own and refuses rollouts that could not be trained on.

    Such a worker tells nothing of single tokens: `on_token` hears of them when a rollout is whole.
    """

    def __init__(self, worker: RolloutWorker, name: str) -> None:
        self.worker = worker
        self._name = name

    async def generate(
        self,
        prompts: list[Group],
        sampling_params: SamplingParams,
        weight_version: int,
        *,
        on_token: Callable[[SampledToken], None] | None = None,
    ) -> list[Rollout]:
        rollouts = await self.worker.generate(prompts, sampling_params, weight_version)
        expected = [(g.group_id, index) for g in prompts for index in _indices(sampling_params)]
        if [(r.group_id, r.sample_index) for r in rollouts] != expected:
            raise QuintetError(
                f"rollout.engine {self._name}: generate() must return n rollouts per group, in the order given, "
                "sample_index from sampling_params.first_sample on."
            )
        for rollout in rollouts:
            check_rollout(rollout, self._name)
            if on_token is not None:
                versions = expand_versions(rollout.weight_versions)
                for token, logprob, version in zip(rollout.response_ids, rollout.logprobs, versions, strict=True):
                    on_token(SampledToken(rollout.sample_index, token, logprob, version))
        return rollouts

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        await self.worker.update_weights(weight_path, version)

    async def health_check(self) -> Health:
        return await self.worker.health_check()

    async def abort(self, group_ids: list[GroupId]) -> None:
        await self.worker.abort(group_ids)


def _indices(params: SamplingParams) -> range:
    return range(params.first_sample, params.first_sample + params.n)


def check_rollout(rollout: Rollout, engine: str) -> None:
    """Raises QuintetError when a list that must have one entry per sampled token has not."""
    tokens = len(rollout.response_ids)
    lengths = {
        "logprobs": len(rollout.logprobs),
        "loss_mask": len(rollout.loss_mask),
        "weight_versions": sum(run.length for run in rollout.weight_versions),
    }
    for name, length in lengths.items():
        if length != tokens:
            raise QuintetError(
                f"rollout.engine {engine}: a response of {tokens} tokens came with {length} {name}.\n"
                "Training needs one entry per sampled token; make the engine return them."
            )

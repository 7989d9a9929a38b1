"""From a config to a rollout server, and to a gateway of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from quintet.cluster.build import Base, engine_worker, load_policy
from quintet.config import RunConfig
from quintet.models.loader import load_tokenizer
from quintet.rollout.config import Role, RolloutConfig
from quintet.rollout.engine.worker import EngineWorker
from quintet.rollout.gateway import Gateway
from quintet.rollout.server import RolloutServer
from quintet.rollout.weight_stream import HEADER_BYTES
from quintet.types import QuintetError


def rollout_server(
    config: RunConfig,
    *,
    key: str,
    weights_root: Path | None,
    weights_stream: bool = False,
    role: Role = Role.BOTH,
    prefill_urls: Sequence[str] = (),
) -> RolloutServer:
    """The configured model and engine, loaded. Raises QuintetError as those do and `check_role` does.

    `weights_stream`: new weights may come in a request, as large as the model's own in float32 (a tied head twice).
    """
    check_role(config.rollout, role, prefill_urls)
    base, model = Base.of(config), load_policy(config.model)
    worker = _engine(config, base, model)
    entries = sum(tensor.numel() for tensor in model.state_dict().values())
    return RolloutServer(
        worker,
        base.tokenizer,
        model=config.model.name,
        key=key,
        context=base.hf_config.get_text_config().max_position_embeddings,
        weights_root=weights_root,
        stream_limit=4 * entries + HEADER_BYTES if weights_stream else None,
        template_kwargs=config.model.chat_template_kwargs,
        role=role,
        prefill_urls=prefill_urls,
    )


def check_role(config: RolloutConfig, role: Role, prefill_urls: Sequence[str]) -> None:
    """Raises QuintetError for what could not work."""
    if role is Role.DECODE and not prefill_urls:
        raise QuintetError("--role decode needs a --prefill-url: the prefill servers that it may get prompts from.")
    if role is Role.PREFILL and prefill_urls:
        raise QuintetError("--prefill-url has no effect with --role prefill; remove it.")
    if (role is Role.BOTH and not prefill_urls) or (config.engine == "embedded" and config.numerics == "fast"):
        return
    raise QuintetError(
        f"--role {role} and --prefill-url need rollout.engine: embedded with rollout.numerics: fast,\n"
        f"not {config.engine} with {config.numerics}."
    )


def gateway(config: RunConfig, *, key: str) -> Gateway:
    """The same as a gateway. Raises QuintetError also for a model without a chat template, which no agent could use."""
    if not load_tokenizer(config.model).has_chat_template:
        raise QuintetError(f"quintet serve gateway: {config.model.name} has no chat template; use an instruct model")
    base = Base.of(config)
    worker = _engine(config, base, load_policy(config.model))
    return Gateway(
        worker,
        base.tokenizer,
        model=config.model.name,
        key=key,
        context=base.hf_config.get_text_config().max_position_embeddings,
        template_kwargs=config.model.chat_template_kwargs,
    )


def _engine(config: RunConfig, base: Base, model: PreTrainedModel) -> EngineWorker:
    worker = engine_worker(config, base, model, 0)
    assert isinstance(worker, EngineWorker), "the command refuses other engines"
    return worker

"""From a config to a rollout server, and to a gateway of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quintet.cluster.build import Base, engine_worker, load_policy
from quintet.config import RunConfig
from quintet.models.loader import load_tokenizer
from quintet.rollout.config import Role, RolloutConfig
from quintet.rollout.engine.worker import EngineWorker
from quintet.rollout.gateway import Gateway
from quintet.rollout.server import RolloutServer
from quintet.types import QuintetError


def rollout_server(
    config: RunConfig,
    *,
    key: str,
    weights_root: Path | None,
    role: Role = Role.BOTH,
    prefill_urls: Sequence[str] = (),
) -> RolloutServer:
    """The configured model and engine, loaded. Raises QuintetError as those do and `check_role` does."""
    check_role(config.rollout, role, prefill_urls)
    base, worker = _engine(config)
    return RolloutServer(
        worker,
        base.tokenizer,
        model=config.model.name,
        key=key,
        context=base.hf_config.get_text_config().max_position_embeddings,
        weights_root=weights_root,
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
    base, worker = _engine(config)
    return Gateway(
        worker,
        base.tokenizer,
        model=config.model.name,
        key=key,
        context=base.hf_config.get_text_config().max_position_embeddings,
        template_kwargs=config.model.chat_template_kwargs,
    )


def _engine(config: RunConfig) -> tuple[Base, EngineWorker]:
    base = Base.of(config)
    worker = engine_worker(config, base, load_policy(config.model), 0)
    assert isinstance(worker, EngineWorker), "the command refuses other engines"
    return base, worker

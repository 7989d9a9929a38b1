"""From a config to a rollout server."""

from __future__ import annotations

from pathlib import Path

from quintet.cluster.build import Base, engine_worker, load_policy
from quintet.config import RunConfig
from quintet.rollout.engine.worker import EngineWorker
from quintet.rollout.server import RolloutServer


def rollout_server(config: RunConfig, *, key: str, weights_root: Path | None) -> RolloutServer:
    """The configured model and engine, loaded. Raises QuintetError as those do."""
    base = Base.of(config)
    worker = engine_worker(config, base, load_policy(config.model), 0)
    assert isinstance(worker, EngineWorker), "the command refuses other engines"
    return RolloutServer(
        worker,
        base.tokenizer,
        model=config.model.name,
        key=key,
        context=base.hf_config.get_text_config().max_position_embeddings,
        weights_root=weights_root,
        template_kwargs=config.model.chat_template_kwargs,
    )

"""The rollout worker: how much is sampled, how, and by which engine."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Role(StrEnum):
    """What a rollout server does for others: whole answers, or one half of them (embedded engine, fast numerics)."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class ToolConfig(BaseModel):
    """One tool of `environment.kind: tools`."""

    model_config = ConfigDict(extra="forbid")

    fn: str = Field(description="calculator, search, python, or module:function (typed parameters)")
    name: str | None = Field(None, description="what the policy calls it; null: the function's own name")
    args: dict[str, Any] = Field(default_factory=dict, description="search: corpus (a file), results")


class EnvironmentConfig(BaseModel):
    """What a rollout of several turns takes place in. `kind` null: a rollout is one answer."""

    model_config = ConfigDict(extra="forbid")

    kind: str | None = Field(
        None,
        description="tools, reasoning_gym, openenv, gym:module:Class, agent:module:function, verifiers:ENV_ID, or "
        "module:Class",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the environment; of a verifiers one also python, its interpreter",
    )
    tools: list[ToolConfig] = Field(default_factory=list)
    sandbox: dict[str, Any] = Field(
        default_factory=dict, description="of the tool python, as for the reward function code: backend, limits ..."
    )
    max_turns: int = Field(8, gt=0)
    turn_tokens: int | None = Field(None, gt=0, description="new tokens per turn; null: what rollout.max_tokens leaves")
    timeout_s: float = Field(30.0, gt=0, description="of one step; longer is a failure of the environment")
    max_sessions: int = Field(512, gt=0, description="episodes at once")


class ServedEngineConfig(BaseModel):
    """An engine behind its own HTTP server: one that runs already (`url`), or one started from an environment of its
    own (`python`)."""

    model_config = ConfigDict(extra="forbid")

    url: str | None = Field(None, description="of a running server; null: start one")
    python: str | None = Field(None, description="interpreter of the environment that has the engine")
    args: list[str] = Field(default_factory=list, description="more arguments of a server that is started")
    env: dict[str, str] = Field(default_factory=dict, description="more environment variables of a server started")
    weights_dir: str | None = Field(
        None, description="folder through which weights reach the server, one that both see; null: /dev/shm"
    )
    start_timeout_s: float = Field(300.0, gt=0)
    silence_s: float = Field(120.0, gt=0, description="how long a server may say nothing")
    api_key_env: str = Field(description="environment variable with the key of the server at `url`")


class VllmConfig(ServedEngineConfig):
    """`rollout.engine: vllm` (`make vllm-env` makes an environment that has it)."""

    api_key_env: str = Field("VLLM_API_KEY", description="environment variable with the key of the server at `url`")
    cpu_kv_gb: int = Field(2, gt=0, description="KV cache on a CPU")
    sleep: bool = Field(
        False,
        description="for one GPU of trainer and engine: the server frees its memory while the trainer works (one at "
        "`url` must have --enable-sleep-mode)",
    )


class SglangConfig(ServedEngineConfig):
    """`rollout.engine: sglang`."""

    api_key_env: str = Field("SGLANG_API_KEY", description="environment variable with the key of the server at `url`")


class TensorrtLlmConfig(ServedEngineConfig):
    """`rollout.engine: tensorrt_llm`. The server at `url` must have TensorRT-LLM's RL control endpoints."""

    api_key_env: str = Field("TRTLLM_API_KEY", description="environment variable with the key of the server at `url`")
    control_key_env: str = Field(
        "TRTLLM_RL_CONTROL_API_KEY", description="environment variable with the key that signs new weights for `url`"
    )


class RolloutConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    engine: str = Field(
        "embedded",
        description="embedded (continuous batching), transformers (any architecture), vllm, sglang, tensorrt_llm, "
        "http (servers of quintet), or module:Class",
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    sglang: SglangConfig = Field(default_factory=SglangConfig)
    tensorrt_llm: TensorrtLlmConfig = Field(default_factory=TensorrtLlmConfig)
    groups_per_step: int = Field(8, gt=0, description="prompts in one controller step")
    group_size: int = Field(8, gt=0, description="samples per prompt")
    numerics: Literal["fast", "reproducible"] = Field(
        "fast",
        description="reproducible: float32; a sample's ids and bits do not depend on what it was batched with, and the "
        "trainer computes the same bits (mismatch/max_abs_logprob is 0)",
    )
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(
        0.0, ge=0.0, le=1.0, description="tokens less likely than this share of the likeliest are not sampled"
    )
    max_tokens: int = Field(256, gt=0, description="new tokens per sample")
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    max_running: int = Field(128, gt=0, description="sequences decoded together at most")
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="fast numerics: C++ compiled on first use (Linux x86-64 with AVX2), or plain torch"
    )
    page_size: int = Field(16, gt=0, description="tokens per KV page of reproducible numerics; fast has pages of 32")
    kv_pages: int | None = Field(None, gt=0, description="pages in all; null: as many as needed, grown on demand")
    prefix_cache_pages: int = Field(
        1024, ge=0, description="fast numerics: KV pages kept for later requests that begin alike; 0: none"
    )
    prefill_tokens: int = Field(1024, gt=0, description="prompt tokens prefilled per engine step at most")
    urls: list[str] = Field(default_factory=list, description="engine http: servers of `quintet serve rollout`")
    prefill_urls: list[str] = Field(
        default_factory=list,
        description="engine http: servers with --role prefill; those of `urls` are then servers with --role decode",
    )
    router: str = Field("sticky", description="engine http: sticky, prefix, power_of_two, round_robin, or module:Class")
    weights_dir: str | None = Field(
        None,
        description="engine http: where weights are published, below the servers' --weights-root; null: they travel "
        "in requests (servers with --weights-stream)",
    )
    timeout_s: float | None = Field(
        None, gt=0, description="a group that takes longer is aborted and tried again (3 tries); null: no limit"
    )

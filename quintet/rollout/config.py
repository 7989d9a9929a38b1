"""The rollout worker: how much is sampled, how, and by which engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VllmConfig(BaseModel):
    """`rollout.engine: vllm`: a server that runs already (`url`), or one started from an environment that has vLLM."""

    model_config = ConfigDict(extra="forbid")

    url: str | None = Field(None, description="of a running server; null: start one")
    api_key_env: str = Field("VLLM_API_KEY", description="environment variable with the key of the server at `url`")
    python: str | None = Field(None, description="interpreter of the environment that has vLLM (make vllm-env)")
    args: list[str] = Field(default_factory=list, description="more arguments of the server, e.g. [--enforce-eager]")
    env: dict[str, str] = Field(default_factory=dict, description="more environment variables of the server")
    cpu_kv_gb: int = Field(2, gt=0, description="KV cache on a CPU")
    weights_dir: str | None = Field(
        None, description="folder through which weights reach the server, one that both see; null: /dev/shm"
    )
    start_timeout_s: float = Field(300.0, gt=0)
    silence_s: float = Field(120.0, gt=0, description="how long a server may say nothing")


class RolloutConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    engine: str = Field(
        "embedded",
        description="embedded (continuous batching), transformers (any architecture), vllm, or module:Class",
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    groups_per_step: int = Field(8, gt=0, description="prompts in one controller step")
    group_size: int = Field(8, gt=0, description="samples per prompt")
    numerics: Literal["fast", "reproducible"] = Field(
        "fast", description="reproducible: float32, a sample's ids and bits do not depend on what it was batched with"
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
    timeout_s: float | None = Field(
        None, gt=0, description="a group that takes longer is aborted and tried again (3 tries); null: no limit"
    )

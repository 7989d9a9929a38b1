"""Where untrusted code runs and what one run may use."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

BACKENDS = ("process", "namespace", "remote")


class LimitsConfig(BaseModel):
    """What one run may use, unless the caller says otherwise."""

    model_config = ConfigDict(extra="forbid")

    wall_s: float = Field(5.0, gt=0, allow_inf_nan=False, description="seconds, waiting for a busy core not counted")
    cpu_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    memory_mb: int = Field(512, ge=16)
    output_bytes: int = Field(1_000_000, ge=1, description="standard output and error together")
    scratch_mb: int = Field(16, ge=1, description="files written")
    processes: int = Field(1, ge=1, description="1: no child process and no thread")


class SandboxConfig(BaseModel):
    """`backend`: `namespace` (bubblewrap; for code of a model), `process` (limits only: for code you trust), `remote`
    (a SandboxFusion-compatible service at `url`), or `module:Class` of your own."""

    model_config = ConfigDict(extra="forbid")

    backend: str = "namespace"
    workers: int | None = Field(None, ge=1, description="warm interpreters; null: one per core")
    max_concurrent: int = Field(64, ge=1, description="runs in flight; times limits.memory_mb is what they may use")
    preload: list[str] = Field(default_factory=list, description="modules imported once, free for every program")
    python_path: list[str] = Field(default_factory=list, description="folders of packages that programs may import")
    url: str | None = Field(None, description="of the remote service, e.g. http://127.0.0.1:8080")
    api_key_env: str | None = Field(None, description="environment variable that holds the remote service's key")
    limits: LimitsConfig = Field(default_factory=LimitsConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.backend not in BACKENDS and ":" not in self.backend:
            raise ValueError(f"backend: {', '.join(BACKENDS)} or module:Class, not {self.backend!r}")
        if (self.url is not None) != (self.backend == "remote"):
            raise ValueError("url goes with backend: remote, and only with it")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r} does not begin with http:// or https://")
        if self.api_key_env is not None and self.backend != "remote":
            raise ValueError("api_key_env goes with backend: remote, and only with it")
        return self

"""A weight version that travels in the body of a request: a safetensors file, received beside the engine.

Nothing of it touches the engine before it is whole and its digest is right; then it is loaded as a published folder is.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Request

from quintet.rollout.openai_api import ApiError
from quintet.types import WeightRef
from quintet.weights.file import MANIFEST_NAME, WEIGHTS_NAME

HEADER_BYTES = 16 * 2**20  # of a safetensors file: the tensors' names and places


class WeightReceiver:
    """Takes one version at a time, of `limit_bytes` at most."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._busy = asyncio.Lock()

    @asynccontextmanager
    async def received(self, request: Request, version: int, digest: str) -> AsyncIterator[WeightRef]:
        """The version as a folder that lives as long as the context.

        Raises ApiError: 409 while another one is received, 413 for one that is too large, 400 for one that ends early.
        """
        if self._busy.locked():
            raise ApiError(409, "another weight version is being received; wait for it", code="busy")
        async with self._busy:
            with tempfile.TemporaryDirectory(prefix="quintet-incoming-") as name:
                folder = Path(name)
                await self._save(request, folder / WEIGHTS_NAME)
                (folder / MANIFEST_NAME).write_text(json.dumps({"version": version, "digest": digest}))
                yield WeightRef(version, str(folder), digest)

    async def _save(self, request: Request, path: Path) -> None:
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._limit:
            raise self._too_large()
        taken = 0
        with path.open("wb") as file:
            async for chunk in request.stream():
                taken += len(chunk)
                if taken > self._limit:
                    raise self._too_large()
                file.write(chunk)
        if announced.isdigit() and taken != int(announced):
            raise ApiError(400, f"the body ended after {taken} of {announced} bytes", code="incomplete")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the weights are larger than this server's limit of {self._limit} bytes", code="large")

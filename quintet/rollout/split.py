"""Prefill servers and decode servers as one worker: for each request one of each is picked.

The decode server gets the prompt's KV from the prefill server itself; nothing of it passes through here. A prefill that
fails is tried with another server, after both sides have been given the newest weights: pages of another version than
the decode server's are refused there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from quintet.rollout.engine.handoff import PrefillFailed
from quintet.rollout.engine.sequence import OnToken
from quintet.rollout.routed import RoutedRolloutWorker
from quintet.rollout.router import Lease, NoWorker, RequestLoadBalancer, WorkerStatus
from quintet.rollout.streaming import TokenWorker
from quintet.types import Group, Rollout, SamplingParams


class DecodeWorker(TokenWorker, Protocol):
    """Generates from prompts that a prefill server computes."""

    async def generate(
        self,
        prompts: list[Group],
        sampling_params: SamplingParams,
        weight_version: int,
        *,
        on_token: OnToken | None = None,
        prefill_url: str | None = None,
    ) -> list[Rollout]: ...


class SplitRolloutWorker(RoutedRolloutWorker):
    """`RolloutWorker` over decode servers and prefill servers, by URL; a URL is one or the other.

    Each kind has a balancer of its own. Further arguments are those of `RoutedRolloutWorker`.
    """

    def __init__(
        self,
        decoders: Mapping[str, DecodeWorker],
        prefills: Mapping[str, TokenWorker],
        balancer: RequestLoadBalancer,
        prefill_balancer: RequestLoadBalancer,
        **options: Any,
    ) -> None:
        super().__init__({**decoders, **prefills}, balancer, **options)
        self._decoders = dict(decoders)
        self._prefills = frozenset(prefills)
        self._prefill_balancer = prefill_balancer

    def _balancer_of(self, name: str) -> RequestLoadBalancer:
        return self._prefill_balancer if name in self._prefills else super()._balancer_of(name)

    def _status(self) -> list[WorkerStatus]:
        return [*super()._status(), *self._prefill_balancer.status()]

    def _can_serve(self, up: Collection[str]) -> bool:
        return any(name in self._prefills for name in up) and any(name in self._decoders for name in up)

    async def _ask(
        self, lease: Lease, group: Group, params: SamplingParams, version: int, on_token: OnToken | None
    ) -> list[Rollout]:
        """Raises PrefillFailed when no prefill server gave the prompt."""
        failed: set[str] = set()
        reason = PrefillFailed("no prefill server was asked")
        for _ in range(self._attempts):
            prefill = await self._prefill_lease(lease, failed)
            try:
                return await self._decoders[lease.worker].generate(
                    [group], params, version, on_token=on_token, prefill_url=prefill.worker
                )
            except PrefillFailed as error:
                reason = error
                failed.add(prefill.worker)
                await asyncio.gather(self._poll_one(prefill.worker), self._poll_one(lease.worker))
            finally:
                self._prefill_balancer.release(prefill)
        raise reason

    async def _prefill_lease(self, lease: Lease, failed: Collection[str]) -> Lease:
        request = replace(lease.request, avoid=frozenset(failed))
        try:
            return await self._prefill_balancer.acquire(request)
        except NoWorker as none:
            raise PrefillFailed(f"prefill: {none}") from none

"""Routing strategies on shared-prefix traffic: how much of the prompts each one lets the workers reuse.

Simulated in virtual time: workers with a cache of prompt blocks, a prefill and a decode rate, and conversations that
share a few long system prompts. What is compared is the choice of worker alone; the code that chooses is the run's own.

    python benchmarks/routing.py [--sessions 300] [--workers 4]
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import OrderedDict

from quintet.clock import VirtualClock
from quintet.rollout.router import STRATEGIES, LoadBalancer, RouteRequest, make_strategy

BLOCK = 16
PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S = 6000.0, 40.0
CACHE_BLOCKS = 2000  # per worker
TURNS, SYSTEM_PROMPTS, SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 5, 8, 1024, 64, 48


class CachedWorker:
    """Prefills what its cache does not hold, one prompt at a time; decodes side by side."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._prefill = asyncio.Lock()
        self.hit = self.total = 0

    async def serve(self, ids: list[int]) -> None:
        hashes, value = [], 0
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            value = hash((value, tuple(ids[start : start + BLOCK])))
            hashes.append(value)
        async with self._prefill:
            known = next((i for i, h in enumerate(hashes) if h not in self._blocks), len(hashes)) * BLOCK
            self.hit, self.total = self.hit + known, self.total + len(ids)
            await self._clock.sleep((len(ids) - known) / PREFILL_TOKENS_PER_S)
            for h in hashes:
                self._blocks[h] = None
                self._blocks.move_to_end(h)
            while len(self._blocks) > CACHE_BLOCKS:
                self._blocks.popitem(last=False)
        await self._clock.sleep(ANSWER_TOKENS / DECODE_TOKENS_PER_S)


def simulate(strategy: str, sessions: int, workers: int) -> tuple[float, float]:
    """(share of prompt tokens found in a cache, answer tokens per second)."""
    clock = VirtualClock()

    async def session(index: int, balancer: LoadBalancer, pool: dict[str, CachedWorker]) -> None:
        draw = random.Random(index)
        system = draw.randrange(SYSTEM_PROMPTS)
        ids = [system * SYSTEM_TOKENS + i for i in range(SYSTEM_TOKENS)]
        await clock.sleep(draw.uniform(0.0, 10.0))
        for _ in range(TURNS):
            ids += [draw.randrange(50_000) for _ in range(TURN_TOKENS)]
            lease = await balancer.acquire(RouteRequest(f"s{index}", ids))
            await pool[lease.worker].serve(ids)
            balancer.release(lease)
            ids += [draw.randrange(50_000) for _ in range(ANSWER_TOKENS)]
            await clock.sleep(draw.expovariate(2.0))  # the agent's own work

    async def program() -> tuple[float, float]:
        balancer = LoadBalancer(make_strategy(strategy), clock=clock)
        pool = {f"worker-{i}": CachedWorker(clock) for i in range(workers)}
        for name in pool:
            balancer.add(name)
        await asyncio.gather(*(session(i, balancer, pool) for i in range(sessions)))
        hit, total = sum(w.hit for w in pool.values()), sum(w.total for w in pool.values())
        return hit / total, sessions * TURNS * ANSWER_TOKENS / clock.now()

    return clock.run(program())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    print(
        f"{options.sessions} conversations of {TURNS} turns, {SYSTEM_PROMPTS} system prompts, {options.workers} workers"
    )
    print("strategy       prefix hit rate   tokens/s")
    for strategy in STRATEGIES:
        hit, rate = simulate(strategy, options.sessions, options.workers)
        print(f"{strategy:14} {hit:15.1%} {rate:10.0f}")


if __name__ == "__main__":
    main()

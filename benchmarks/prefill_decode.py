"""Prefill and decoding in separate processes: what the KV's way costs, and that nothing else changes.

    python benchmarks/prefill_decode.py                            # SmolLM2-135M on this machine
    python benchmarks/prefill_decode.py --model builtin:tiny --prompts 50

Starts three servers (`quintet serve rollout`): one that does all, a prefill server and a decode server. First come
`--prompts` prompts with `--tokens` new tokens each, by the one server and by the pair: SAME tells how many have the
same tokens and log-probabilities. Then comes the way of the KV of a prompt of 1,000 tokens, by socket and by shared
memory: TRANSFER tells its bytes and the time from the prefill engine's pages to the decode engine's, `out` being what
`/prefill` takes longer with the KV than without (the prompt is in the prefix cache both times), `in` the writing of the
decode engine's pages.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import numpy as np
from _sides import machine

from quintet.models.config import ModelConfig
from quintet.models.device import resolve_device, resolve_dtype
from quintet.models.loader import load_model
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.build import make_engine
from quintet.rollout.engine.fast import FastEngine
from quintet.rollout.engine.step import PAGE
from quintet.rollout.http import HttpRolloutWorker, request_body
from quintet.rollout.transfer import PrefillClient
from quintet.types import Group, GroupId, Prompt, Rollout, SamplingParams

LONG = 1000  # tokens
PAGES = np.arange(1, -(-LONG // PAGE) + 1)
COUNTS = np.minimum(LONG - PAGE * np.arange(len(PAGES)), PAGE)


@contextmanager
def served(model: str, dtype: str, key: str, *options: str) -> Iterator[str]:
    """A server in a process of its own, and its URL."""
    command = [sys.executable, "-m", "quintet.cli.main", "serve", "rollout", "--model", model, "--port", "0"]
    # a budget of tokens that cuts no prompt: in bf16 a token that is left alone may be rounded otherwise (NOTES.md)
    chosen = (f"model.dtype={dtype}", "rollout.max_running=256", "rollout.prefill_tokens=65536")
    settings = [part for setting in chosen for part in ("--set", setting)]
    environment = os.environ | {"QUINTET_ROLLOUT_KEY": key}
    process = subprocess.Popen([*command, *settings, *options], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("url: "))
        yield url
    finally:
        process.terminate()
        process.wait()


def group(index: int, size: int, vocabulary: int) -> Group:
    pick = random.Random(index)
    return Group(GroupId(f"p{index}"), Prompt(f"p{index}", [pick.randrange(100, vocabulary) for _ in range(size)]))


async def generate(url: str, key: str, groups: list[Group], tokens: int, prefill_url: str | None) -> list[Rollout]:
    worker = HttpRolloutWorker(url, key=key)
    try:
        return await worker.generate(groups, SamplingParams(max_tokens=tokens, seed=1), 0, prefill_url=prefill_url)
    finally:
        await worker.close()


def compare(whole: list[Rollout], split: list[Rollout]) -> str:
    failed = [r.failure for r in (*whole, *split) if r.failure]
    assert not failed, failed[0]
    pairs = list(zip(whole, split, strict=True))
    ids = sum(a.response_ids == b.response_ids for a, b in pairs)
    bits = sum(a.logprobs == b.logprobs for a, b in pairs)
    alike = [(a.logprobs, b.logprobs) for a, b in pairs if a.response_ids == b.response_ids]
    gaps = [abs(x - y) for mine, theirs in alike for x, y in zip(mine, theirs, strict=True)]
    return f"tokens {ids} of {len(pairs)}, log-probabilities to the bit {bits}, farthest apart {max(gaps):.1e}"


async def transfer(
    url: str, key: str, asked: Group, engine: FastEngine, *, shared: bool, turns: int
) -> tuple[float, float]:
    """Seconds that the KV adds to an answer, and seconds until it is in the pages of a decoding engine."""
    client = PrefillClient(url, key=key, shared=shared)
    bare, whole, inside = list[float](), list[float](), list[float]()
    for _ in range(turns + 1):
        for tokens, taken in ((1, bare), (2, whole)):  # with one new token no sample goes on, so no KV is wanted
            prompt, sampling = request_body(asked, SamplingParams(max_tokens=tokens))
            began = time.perf_counter()
            found = await client.prefill({"prompt": prompt, "sampling": sampling})
            taken.append(time.perf_counter() - began)
            if found.kv is not None:
                began = time.perf_counter()
                engine.model.write_kv(PAGES, COUNTS, found.kv)
                inside.append(time.perf_counter() - began)
    await client.close()
    return median(whole[1:]) - median(bare[1:]), median(inside[1:])


def make_decoder(model: str, dtype: str) -> FastEngine:
    loaded, device = load_model(ModelConfig(name=model)), resolve_device("auto")
    engine = make_engine(
        loaded.config,
        loaded.state_dict(),
        eos_ids=(),
        decode=lambda ids: "",
        config=RolloutConfig(),
        device=device,
        dtype=resolve_dtype(dtype, device),
    )
    assert isinstance(engine, FastEngine)
    return engine


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--turns", type=int, default=9)
    return parser.parse_args()


def main() -> None:
    args, key = arguments(), secrets.token_urlsafe(24)
    vocabulary = load_model(ModelConfig(name=args.model)).config.vocab_size
    print(f"{machine()}, {args.model}, {args.dtype}", flush=True)
    with ExitStack() as stack:
        prefill = stack.enter_context(served(args.model, args.dtype, key, "--role", "prefill"))
        options = ("--role", "decode", "--prefill-url", prefill)
        decode = stack.enter_context(served(args.model, args.dtype, key, *options))
        with served(args.model, args.dtype, key) as both:
            groups = [group(index, 20 + index % 60, vocabulary) for index in range(args.prompts)]
            whole = asyncio.run(generate(both, key, groups, args.tokens, None))
        split = asyncio.run(generate(decode, key, groups, args.tokens, prefill))
        print(f"SAME {compare(whole, split)}", flush=True)
        engine, asked = make_decoder(args.model, args.dtype), group(-1, LONG, vocabulary)
        for name, shared in (("socket", False), ("shared_memory", True)):
            out, inside = asyncio.run(transfer(prefill, key, asked, engine, shared=shared, turns=args.turns))
            print(
                f"TRANSFER {name} per {LONG:,} prompt tokens: {LONG * engine.layout.token_bytes:,} bytes, "
                f"{(out + inside) * 1e3:.1f} ms (out {out * 1e3:.1f}, in {inside * 1e3:.1f})"
            )


if __name__ == "__main__":
    main()

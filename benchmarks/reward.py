"""Verdicts a second: answers of arithmetic and trivial programs, each against the obvious alternative.

    python benchmarks/reward.py
    python benchmarks/reward.py --only math --samples 4000 --rounds 5

math: GSM8K-style responses (some 100 words of working, the answer in a box, half of them wrong) in groups of eight,
through the reward service as a run uses it, against math-verify called in a process pool of as many processes.
code: a program that prints a sum, isolated, in the warm namespace sandbox, against one `bwrap` per program.
slow: 64 samples of which every tenth sleeps past a limit of 5 s, against the same without: what it costs, in limits.

The sides take turns; the medians of the rounds are compared. Both must give the expected verdicts, or it is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from quintet.reward.config import RewardConfig
from quintet.reward.math import verdict
from quintet.reward.sample import Sample
from quintet.reward.service import LocalRewardService
from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.factory import make_sandbox
from quintet.sandbox.protocol import Limits, Program
from quintet.types import FinishReason, Group, GroupId, Prompt, QuintetError, Rollout

GROUP = 8
WORDS = ("so each of them", "has", "then we add", "what is left", "of the first", "and divide by", "how many", "before")
PROGRAM = "print(sum(range(10)))\n"
BWRAP = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--proc", "/proc"]
BWRAP += ["--ro-bind", sys.prefix, sys.prefix]  # seen also where it lies below /tmp

Side = Callable[[], float]  # runs once; samples a second


class Ratio(NamedTuple):
    """Medians in samples a second."""

    name: str
    ours: float
    theirs: float

    def line(self) -> str:
        ratio = self.ours / self.theirs
        return f"RATIO {self.name} {ratio:.2f}x ours={self.ours:.0f}/s theirs={self.theirs:.0f}/s"


class Cost(NamedTuple):
    """What `sleeping` samples cost a step, in seconds."""

    name: str
    seconds: float
    sleeping: int

    def line(self) -> str:
        limits = self.seconds / LIMIT_S
        return f"COST {self.name} {limits:.2f} limits ({self.seconds:.2f} s) for {self.sleeping} samples that sleep"


def compare(name: str, ours: Side, theirs: Side, rounds: int) -> Ratio:
    """Alternating, so that a slow minute of the machine meets both."""
    rates = [(ours(), theirs()) for _ in range(rounds)]
    return Ratio(name, statistics.median(r for r, _ in rates), statistics.median(r for _, r in rates))


# ---- math ------------------------------------------------------------------------------------------


class Row(NamedTuple):
    gold: str
    response: str
    right: bool


def gsm8k_style(samples: int) -> list[Row]:
    """The same rows every time: integers mostly, some sums of money with grouping commas, some decimals."""
    rng = random.Random("benchmarks/reward")
    rows = []
    for i in range(samples):
        if i % GROUP == 0:
            value = rng.choice([rng.randint(1, 200), rng.randint(1000, 90_000), rng.randint(1, 400) / 4])
        right = rng.random() < 0.5
        stated = value if right else value + rng.randint(1, 9)
        text = f"\\${stated:,}" if stated >= 1000 else f"{stated}"
        words = " ".join(f"{rng.choice(WORDS)} {rng.randint(1, 99)}" if rng.random() < 0.2 else rng.choice(WORDS)
                         for _ in range(100))  # fmt: skip
        rows.append(Row(f"{value}", f"{words}. The answer is \\boxed{{{text}}}.", right))
    return rows


def groups_of(rows: list[Row]) -> list[Group]:
    groups = []
    for first in range(0, len(rows), GROUP):
        gid = GroupId(f"p{first}")
        some = rows[first : first + GROUP]
        rollouts = [
            Rollout(gid, i, [1], list(range(300)), row.response, [0.0] * 300, [1] * 300, [], FinishReason.STOP)
            for i, row in enumerate(some)
        ]
        groups.append(Group(gid, Prompt(gid.prompt_id, [1], text="q", answer=some[0].gold), rollouts))
    return groups


def check(found: list[bool], rows: list[Row], who: str) -> None:
    wrong = [row for row, right in zip(rows, found, strict=True) if right != row.right]
    if wrong:
        raise QuintetError(f"{who} is wrong on {len(wrong)} of {len(rows)} samples, first {wrong[0]}")


@contextmanager
def service_side(rows: list[Row], workers: int) -> Iterator[Side]:
    config = RewardConfig.model_validate({"functions": [{"fn": "math"}], "workers": workers})
    service, groups = LocalRewardService(config), groups_of(rows)

    async def each_group_as_it_comes() -> list[bool]:
        scored = await asyncio.gather(*(service.score([group]) for group in groups))
        return [score.reward == 1.0 for [scores] in scored for score in scores]

    def run() -> float:
        start = time.perf_counter()
        found = asyncio.run(each_group_as_it_comes())
        seconds = time.perf_counter() - start
        check(found, rows, "quintet")
        return len(rows) / seconds

    try:
        service.start()
        yield run
    finally:
        service.close()


def math_verify_verdict(row: Row) -> bool:
    """As its documentation shows, in a worker process (whose main thread may set its alarms)."""
    from math_verify import parse, verify

    return bool(verify(parse(row.gold), parse(row.response)))


@contextmanager
def math_verify_side(rows: list[Row], workers: int) -> Iterator[Side]:
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(math_verify_verdict, rows[: 4 * workers]))  # import it

        def run() -> float:
            start = time.perf_counter()
            found = list(pool.map(math_verify_verdict, rows, chunksize=GROUP))
            seconds = time.perf_counter() - start
            check(found, rows, "math-verify")
            return len(rows) / seconds

        yield run


def graded_here(rows: list[Row]) -> float:
    """Samples a second of the bare grader in this process, on one core: what the service adds can be read off."""
    samples = [Sample("p", row.response, [], False, answer=row.gold) for row in rows]
    start = time.perf_counter()
    found = [verdict(sample).value == 1.0 for sample in samples]
    seconds = time.perf_counter() - start
    check(found, rows, "quintet")
    return len(rows) / seconds


def bench_math(samples: int, workers: int, rounds: int) -> Ratio:
    rows = gsm8k_style(samples)
    few = rows[: max(GROUP, samples // 10)]  # it is the slow side
    with service_side(rows, workers) as ours, math_verify_side(few, workers) as theirs:
        ratio = compare("math_verdicts_vs_math_verify_pool", ours, theirs, rounds)
    alone = statistics.median(graded_here(rows) for _ in range(rounds))
    print(f"math: {ratio.ours:.0f} verdicts/s through the service, {alone:.0f}/s of the bare grader on one core")
    return ratio


# ---- code ------------------------------------------------------------------------------------------


@contextmanager
def sandbox_side(samples: int, workers: int) -> Iterator[Side]:
    sandbox = make_sandbox(SandboxConfig.model_validate({"backend": "namespace", "workers": workers}))

    async def one() -> None:
        result = await sandbox.run(Program(PROGRAM), Limits())
        if result.stdout != "45\n":
            raise QuintetError(f"the sandbox gave {result}")

    async def run() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(samples)))
        return samples / (time.perf_counter() - start)

    with asyncio.Runner() as runner:
        runner.run(one())  # start its workers
        try:
            yield lambda: runner.run(run())
        finally:
            runner.run(sandbox.close())


@contextmanager
def bwrap_side(samples: int, workers: int) -> Iterator[Side]:
    command = [*BWRAP, sys.executable, "-I", "-S", "-c", PROGRAM]

    def one(_: int) -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.stdout != "45\n":
            raise QuintetError(f"bwrap gave {done}")

    with ThreadPoolExecutor(workers) as pool:

        def run() -> float:
            start = time.perf_counter()
            list(pool.map(one, range(samples)))
            return samples / (time.perf_counter() - start)

        yield run


def bench_code(samples: int, workers: int, rounds: int) -> Ratio:
    if shutil.which("bwrap") is None:
        raise QuintetError("bwrap is not installed: make sandbox-deps")
    with sandbox_side(samples, workers) as ours, bwrap_side(max(20, samples // 10), workers) as theirs:
        ratio = compare("code_samples_vs_bwrap_each", ours, theirs, rounds)
    print(f"code: {ratio.ours:.0f} isolated samples/s")
    return ratio


# ---- slow ------------------------------------------------------------------------------------------

LIMIT_S = 5.0


def sleeps_on_request(solution_str: str, ground_truth: str) -> float:
    if solution_str == "slow":
        time.sleep(10 * LIMIT_S)
    return 1.0


def step_s(service: LocalRewardService, texts: list[str]) -> float:
    rows = [Row("1", text, True) for text in texts]
    start = time.perf_counter()
    scores = asyncio.run(service.score(groups_of(rows)))
    seconds = time.perf_counter() - start
    wrong = sum((s.reward is None) != (t == "slow") for s, t in zip((s for g in scores for s in g), texts, strict=True))
    if wrong:
        raise QuintetError(f"{wrong} samples were graded wrongly")
    return seconds


def bench_slow(samples: int, workers: int, rounds: int) -> Cost:
    """Every tenth of 64 samples; `samples` is for the others."""
    config = {"functions": [{"fn": f"{__file__}:sleeps_on_request"}], "workers": workers, "timeout_s": LIMIT_S}
    service = LocalRewardService(RewardConfig.model_validate(config | {"max_failure_frac": 1.0}))
    try:
        service.start()
        turns = []
        for _ in range(rounds):
            usual = step_s(service, ["quick"] * 64)
            turns.append(step_s(service, ["slow" if i % 10 == 9 else "quick" for i in range(64)]) - usual)
    finally:
        service.close()
    return Cost("slow_grader", statistics.median(turns), sum(i % 10 == 9 for i in range(64)))


BENCHES = {"math": bench_math, "code": bench_code, "slow": bench_slow}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Verdicts a second against the obvious alternatives.")
    parser.add_argument("--only", choices=BENCHES, help="one of them; all if absent")
    parser.add_argument("--samples", type=int, default=2000, help="per round; the slow side takes a tenth of them")
    parser.add_argument("--workers", type=int, default=2, help="processes on either side")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    chosen = [options.only] if options.only else list(BENCHES)
    try:
        ratios = [BENCHES[name](options.samples, options.workers, options.rounds) for name in chosen]
    except QuintetError as error:
        raise SystemExit(f"{parser.prog}: {error}") from None
    for ratio in ratios:
        print(ratio.line())


if __name__ == "__main__":
    main()

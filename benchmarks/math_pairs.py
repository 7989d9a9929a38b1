"""Right verdicts on pairs of reference and answer: ours and plain math-verify's, side by side.

    python benchmarks/math_pairs.py tests/data/math_pairs.jsonl
    python benchmarks/math_pairs.py tests/data/math_kinds.jsonl --misses

Rows have `gold`, `answer`, `form` (`final`, the default, or `response`) and `expect`. math-verify gets the reference
between dollar signs and a final answer in a box, as its documentation advises. Its own time limit is an alarm, which
does not interrupt the building of a huge number: so it runs in a process that is killed after LIMIT_S, and such an
answer counts as refused. Seconds are of the processor, so that a busy machine does not count, but a killed call's.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from quintet.reward.errors import CallTimeout
from quintet.reward.loading import FunctionSource
from quintet.reward.math import verdict
from quintet.reward.sample import Sample
from quintet.reward.worker_process import Template, WorkerProcess

LIMIT_S = 10.0


class Outcome(NamedTuple):
    row: dict[str, Any]
    right: bool
    seconds: float

    @property
    def missed(self) -> bool:
        return self.right != self.row["expect"]


def response_of(row: dict[str, Any]) -> str:
    return row["answer"] if row.get("form") == "response" else rf"\boxed{{{row['answer']}}}"


def math_verify(solution_str: str, ground_truth: str) -> dict[str, float]:
    """A reward function in verl's signature, for a worker process."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whatever it cannot parse
    start = time.process_time()
    right = bool(verify(parse(f"${ground_truth}$"), parse(solution_str)))
    return {"score": float(right), "seconds": time.process_time() - start}


def ours(row: dict[str, Any]) -> Outcome:
    start = time.process_time()
    right = verdict(Sample("p", response_of(row), [], False, answer=row["gold"])).value == 1.0
    return Outcome(row, right, time.process_time() - start)


def theirs(row: dict[str, Any], slot: WorkerProcess) -> Outcome:
    try:
        reply = slot.call(0, [Sample("p", response_of(row), [], False, answer=row["gold"])], LIMIT_S)
    except CallTimeout:
        return Outcome(row, False, LIMIT_S)
    if reply.failed is not None:  # it raised
        return Outcome(row, False, reply.seconds)
    [found] = reply.verdicts
    return Outcome(row, found.value == 1.0, found.info["seconds"])


def line(name: str, outcomes: list[Outcome]) -> str:
    missed = [outcome for outcome in outcomes if outcome.missed]
    seconds = [outcome.seconds for outcome in outcomes]
    return (
        f"{name:12} {len(outcomes) - len(missed):5} of {len(outcomes)} right "
        f"({1 - len(missed) / len(outcomes):.1%}), {sum(o.right for o in missed)} wrong answers accepted, "
        f"{sum(not o.right for o in missed)} right ones refused, "
        f"median {statistics.median(seconds) * 1e3:.2f} ms, worst {max(seconds) * 1e3:.0f} ms"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Right verdicts, ours and math-verify's.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--misses", action="store_true", help="print every miss of either")
    options = parser.parse_args(arguments)
    rows = [json.loads(text) for text in options.file.read_text().splitlines() if text.strip()]
    found: dict[str, list[Outcome]] = {"quintet": [], "math-verify": []}
    template = Template([FunctionSource("math_verify", f"{Path(__file__)}:math_verify")])
    slot = WorkerProcess(template)
    try:
        for row in rows[:1] + rows:  # the first twice: imports do not count
            mine, other = ours(row), theirs(row, slot)
            found["quintet"].append(mine)
            found["math-verify"].append(other)
    finally:
        slot.close()
        template.close()
    found = {name: outcomes[1:] for name, outcomes in found.items()}
    for name, outcomes in found.items():
        for outcome in (o for o in outcomes if o.missed and options.misses):
            print(f"{name}: {outcome.row['gold']} ? {outcome.row['answer']}: expected {outcome.row['expect']}")
    for name, outcomes in found.items():
        print(line(name, outcomes))


if __name__ == "__main__":
    main()

"""The reward benchmark: its rows, its check of the verdicts, its last lines."""

from __future__ import annotations

import re

import pytest

from benchmarks.reward import GROUP, Ratio, Row, check, compare, groups_of, gsm8k_style, main
from quintet.types import QuintetError


def test_rows_are_the_same_every_time_and_half_of_them_right() -> None:
    rows = gsm8k_style(400)
    assert rows == gsm8k_style(400)
    assert 0.4 < sum(row.right for row in rows) / len(rows) < 0.6
    assert {len(group.rollouts) for group in groups_of(rows)} == {GROUP}


def test_a_side_that_gives_wrong_verdicts_is_refused() -> None:
    with pytest.raises(QuintetError, match="x is wrong on 1 of 2 samples"):
        check([True, True], [Row("1", "1", True), Row("1", "2", False)], "x")


def test_sides_take_turns_and_medians_are_compared() -> None:
    calls: list[str] = []
    rates = {"ours": iter([10.0, 30.0, 20.0]), "theirs": iter([4.0, 1.0, 5.0])}

    def side(name: str) -> float:
        calls.append(name)
        return next(rates[name])

    ratio = compare("n", lambda: side("ours"), lambda: side("theirs"), 3)
    assert ratio == Ratio("n", 20.0, 4.0)
    assert calls == ["ours", "theirs"] * 3
    assert ratio.line() == "RATIO n 5.00x ours=20/s theirs=4/s"


def test_math_runs_through_service_and_pool_to_a_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "math", "--samples", "64", "--rounds", "1", "--workers", "1"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"RATIO math_verdicts_vs_math_verify_pool \d+\.\d\dx ours=\d+/s theirs=\d+/s", last)

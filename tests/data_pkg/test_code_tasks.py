"""The task code_lines: sentences once each, a right program for each, tests that tell a wrong one."""

from __future__ import annotations

import pytest

from quintet.data.tasks import task_rows
from quintet.types import QuintetError


@pytest.mark.parametrize(("operations", "rows"), [(1, 28), (2, 784)])
def test_every_sentence_once_with_a_program_that_passes_its_tests(operations: int, rows: int) -> None:
    made = [row.values for row in task_rows("code_lines", {"operations": operations}, 0)]
    assert len(made) == len({row["prompt"] for row in made}) == rows
    for row in made:
        function = eval(f"lambda x: {row['answer']}")
        assert [function(*case["args"]) for case in row["test_cases"]] == [c["expected"] for c in row["test_cases"]]


def test_steps_are_taken_in_the_order_in_which_they_are_said() -> None:
    made = {row.values["prompt"]: row.values for row in task_rows("code_lines", {}, 0)}
    assert made["add 3 times 2: "]["answer"] == "(x+3)*2" and made["times 2 add 3: "]["answer"] == "x*2+3"
    assert made["minus 1 negate: "]["answer"] == "-(x-1)" and made["negate square: "]["answer"] == "(-x)*(-x)"
    assert {"function": "f", "args": [7], "expected": 20} in made["add 3 times 2: "]["test_cases"]


def test_count_and_seed_choose_the_sentences() -> None:
    first, again = (task_rows("code_lines", {"operations": 3, "count": 50}, 1) for _ in range(2))
    other = task_rows("code_lines", {"operations": 3, "count": 50}, 2)
    assert [r.values for r in first] == [r.values for r in again] != [r.values for r in other]


@pytest.mark.parametrize("args", [{"operations": 0}, {"largest": 1}, {"count": 785}, {"operations": 9}])
def test_sentences_that_cannot_be_made_are_refused(args: dict[str, int]) -> None:
    with pytest.raises(QuintetError, match="1 <= operations <= 4"):
        task_rows("code_lines", args, 0)

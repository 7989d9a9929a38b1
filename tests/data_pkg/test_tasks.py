"""Procedural tasks: right answers, each question once, in an order fixed by the seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import reasoning_gym

from quintet.data.dataset import build_prompts, load_rows
from quintet.data.reasoning import reasoning_gym_rows, score_answer
from quintet.data.tasks import TASKS, task_rows
from quintet.types import QuintetError
from tests.data_pkg.helpers import config, encode


def rows(name: str, seed: int = 0, **args: Any) -> list[dict[str, Any]]:
    return [row.values for row in task_rows(name, args, seed)]


def mine(*, seed: int, n: int = 2) -> Iterator[dict[str, Any]]:
    """A task of a user, found by its import path."""
    for i in range(n):
        yield {"prompt": f"{seed}:{i}", "answer": str(i)}


def test_sums_of_the_smollm2_recipe() -> None:
    made = rows("sums", min=1, max=20)
    assert {(r["a"], r["b"]) for r in made} == {(a, b) for a in range(1, 21) for b in range(1, 21)}
    assert len(made) == 400
    for r in made:
        assert r["prompt"] == f"What is {r['a']} + {r['b']}? Answer with only the number."
        assert r["answer"] == str(r["a"] + r["b"])


def test_sums_of_the_tiny_model_are_padded_and_reversed() -> None:
    made = {r["prompt"]: r["answer"] for r in rows("sums", digits=2, reverse=True, template="{a}+{b}=")}
    assert len(made) == 10_000
    assert (made["37+58="], made["05+07="], made["60+60="]) == ("59", "21", "021")
    padded = {
        r["prompt"]: r["answer"] for r in rows("sums", digits=2, answer_digits=3, reverse=True, template="{a}+{b}=")
    }
    assert padded["37+58="] == "590"


def test_order_follows_the_seed_and_count_takes_the_first() -> None:
    assert rows("sums", 3) == rows("sums", 3) != rows("sums", 4)
    assert len({r["prompt"] for r in rows("sums", max=10**6, count=50)}) == 50


def test_the_other_tasks_answer_rightly() -> None:
    for r in rows("differences", max=12):
        assert r["answer"] == str(r["a"] - r["b"])
    for r in rows("products"):
        assert r["answer"] == str(r["a"] * r["b"])
    for r in rows("compare", max=9):
        assert eval(f"{r['a']} {'==' if r['answer'] == '=' else r['answer']} {r['b']}")
    for r in rows("reverse", count=50):
        assert r["answer"] == "".join(reversed(r["s"])) and r["s"] in r["prompt"]
    for r in rows("sort", count=50):
        assert r["answer"] == "".join(sorted(r["s"]))
    for r in rows("copy", count=50):
        assert r["answer"] == r["s"] and 3 <= len(r["s"]) <= 8


def test_negative_answer_keeps_its_sign_in_front_when_reversed() -> None:
    made = {r["prompt"]: r["answer"] for r in rows("differences", reverse=True, template="{a}-{b}=")}
    assert (made["5-20="], made["90-5="]) == ("-51", "58")


@pytest.mark.parametrize("name", ["copy", "reverse", "sort"])
def test_strings_are_distinct(name: str) -> None:
    assert len({r["s"] for r in rows(name, count=300, min_length=2, max_length=2)}) == 300


def test_task_of_a_user_by_import_path() -> None:
    assert rows("tests.data_pkg.test_tasks:mine", 7, n=3)[2] == {"prompt": "7:2", "answer": "2"}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("sum", {}, r"no task 'sum'; the nearest is 'sums'.\nThere are sums, differences"),
        ("no_such_module:f", {}, "the task module 'no_such_module' cannot be imported"),
        ("quintet.data.tasks:nothing", {}, "has no function 'nothing'"),
        ("sums", {"maximum": 3}, r"no argument 'maximum'. Did you mean 'max'"),
        ("sums", {"max": "3"}, r"data\.args\.max of task:sums: .*integer.*found '3'"),
        ("sums", {"min": 5, "max": 3}, "min 5 and max 3 leave no pair"),
        ("sums", {"max": 1, "count": 5}, "count: 5, but min 0 and max 1 make 4 different pairs"),
        ("sums", {"max": 5000}, "25010001 pairs are too many to hold"),
        ("sums", {"template": "{x}"}, r"template: '\{x\}' cannot be filled: .*\nIts fields are \{a\}, \{b\}"),
        ("copy", {"alphabet": "ab", "max_length": 3}, "count: 1000, but at most 4 distinct strings"),
        ("copy", {"min_length": 4, "max_length": 2}, "min_length <= max_length"),
        ("tests.data_pkg.test_tasks:mine", {"n": 0}, "makes no row"),
    ],
)
def test_mistake_is_named(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(QuintetError, match=message):
        task_rows(name, args, 0)


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_makes_prompts_by_the_default_columns(name: str) -> None:
    cfg = config(f"task:{name}", args={"count": 5})
    prompts, skipped = build_prompts(load_rows(cfg, 0)[0], cfg, encode)
    assert (len(prompts), skipped) == (5, [])
    assert all(p.answer for p in prompts)


@pytest.mark.parametrize("name", ["basic_arithmetic", "arc_1d", "knights_knaves", "rearc"])
def test_reasoning_gym_entry_is_graded_after_a_journal_round_trip(name: str) -> None:
    cfg = config(f"reasoning_gym:{name}", args={"size": 3})
    prompts, _ = build_prompts(load_rows(cfg, 5)[0], cfg, encode)
    entries = reasoning_gym.create_dataset(name, size=3, seed=5)
    for prompt, entry in zip(prompts, entries, strict=True):
        stored = msgspec.json.decode(msgspec.json.encode(prompt.metadata))
        assert (prompt.text, prompt.answer) == (entry["question"], entry["answer"])
        assert stored["metadata"]["source_index"] == entry["metadata"]["source_index"]
        assert score_answer(stored, prompt.answer) == 1.0
        assert score_answer(stored, "certainly wrong") < 1.0


def test_reasoning_gym_task_without_a_reference_answer_needs_a_null_answer_column() -> None:
    source = {"source": "reasoning_gym:graph_color", "args": {"size": 2}}
    with pytest.raises(QuintetError, match=r"set data\.columns\.answer to null"):
        build_prompts(load_rows(config(**source), 0)[0], config(**source), encode)
    cfg = config(**source, columns={"answer": None})
    assert len(build_prompts(load_rows(cfg, 0)[0], cfg, encode)[0]) == 2


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("basic_arithmetics", {}, "no task 'basic_arithmetics'; the nearest are basic_arithmetic"),
        ("basic_arithmetic", {"terms": 2}, r"refuses .*'terms'"),
        ("basic_arithmetic", {"min_terms": -1}, "refuses"),
    ],
)
def test_reasoning_gym_mistake_is_named(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(QuintetError, match=message):
        reasoning_gym_rows(name, args, 0)


def test_reasoning_gym_grader_refuses_other_prompts() -> None:
    with pytest.raises(QuintetError, match=r"needs prompts of data\.source reasoning_gym:NAME"):
        score_answer({"a": 1}, "2")


def test_missing_reasoning_gym_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(QuintetError, match=r"pip install 'quintet\[reasoning-gym\]'"):
        reasoning_gym_rows("basic_arithmetic", {}, 0)


def test_a_tools_products_come_with_the_call_the_reply_and_the_answer() -> None:
    made = rows("tool_products", min=10, max=20)
    assert {row["prompt"] for row in made} == {f"{a}*{b}=" for a in range(10, 21) for b in range(10, 21)}
    first = made[0]
    a, b = first["a"], first["b"]
    assert first["demonstration"] == [f"<c>{a}*{b}</c>", f"[{a * b}]", str(a * b)]
    assert first["answer"] == str(a * b)
    mixed = [len(row["demonstration"]) for row in rows("tool_products", min=10, max=39, direct=0.8)]
    assert 0.75 < mixed.count(1) / len(mixed) < 0.85
    assert mixed.count(1) + mixed.count(3) == len(mixed) == 900

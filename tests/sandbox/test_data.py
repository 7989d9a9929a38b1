"""Plain data crosses the wall exactly; everything else is refused, in both directions."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from enum import IntEnum
from typing import Any, NamedTuple

import pytest

from quintet.sandbox.jail.data import MAX_HASHED, NotData, decode, encode


def across(value: Any) -> Any:
    return decode(encode(value, 10_000_000))


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, 1, -1, 127, 128, -128, -129, 2**63, -(10**400), 1.5, -0.0, math.inf, "", "é\0", b"",
        b"\0\xff", [], [1, [2, (3,)]], (), (1,), set(), {1, "a"}, frozenset({(1, 2)}), {}, {"a": [1], (1, 2): None},
    ],
)  # fmt: skip
def test_data_arrives_as_it_was(value: Any) -> None:
    arrived = across(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_negative_zero_and_nan_keep_their_bits() -> None:
    assert math.copysign(1, across(-0.0)) == -1
    assert math.isnan(across(math.nan))


class EqualToAll(str):
    """Says yes to everything, and lies about its content through every method it has."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return "lie"

    def encode(self, *_: Any, **__: Any) -> bytes:
        return b"lie"


class LyingList(list[int]):
    def __iter__(self) -> Any:
        return iter([42])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: Any) -> Any:
        return 42


class LyingDict(dict[Any, Any]):
    def items(self) -> Any:
        return [("a", 42)]

    def keys(self) -> Any:
        return ["a"]


class LyingInt(int):
    def __add__(self, _: int) -> int:
        return 42

    def __index__(self) -> int:
        return 42

    def to_bytes(self, *_: Any, **__: Any) -> bytes:
        return b"*"


class Pair(NamedTuple):
    x: int
    y: int


class Color(IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (EqualToAll("truth"), "truth"),
        (LyingList([1, 2]), [1, 2]),
        (LyingDict({"b": 1}), {"b": 1}),
        (LyingInt(7), 7),
        (Color.RED, 3),
        (Counter("aab"), {"a": 2, "b": 1}),
        (defaultdict(list, {1: [2]}), {1: [2]}),
        (Pair(1, 2), (1, 2)),
        (bytearray(b"ab"), b"ab"),
        ([EqualToAll("x")], ["x"]),
    ],
)
def test_instances_of_subclasses_arrive_as_the_plain_type_with_their_true_content(value: Any, plain: Any) -> None:
    arrived = across(value)
    assert arrived == plain
    assert type(arrived) is type(plain)


class Pretender:
    """Claims to be an int where a careless check looks."""

    __class__ = int  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


NOT_DATA = {
    "pretender": Pretender(),
    "object": object(),
    "function": len,
    "iterator": iter([]),
    "range": range(3),
    "class": type,
    "deep down": {1: {2: Pretender()}},
}


@pytest.mark.parametrize("value", NOT_DATA.values(), ids=NOT_DATA)
def test_what_is_not_data_is_refused(value: Any) -> None:
    with pytest.raises(NotData, match="is not plain data"):
        encode(value, 1000)


def test_cycles_deep_nesting_and_shared_parts_that_explode_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(NotData, match="nested"):
        encode(cycle, 10_000)
    bomb: Any = "x"
    for _ in range(50):
        bomb = [bomb, bomb]
    with pytest.raises(NotData, match="too large"):
        encode(bomb, 10_000)


def test_keys_that_all_hash_alike_are_refused() -> None:
    same_hash = {i * (2**61 - 1) for i in range(500)}
    with pytest.raises(NotData, match="hash alike"):
        across(same_hash)
    with pytest.raises(NotData, match="entries"):
        across(set(range(MAX_HASHED + 1)))
    assert decode(encode(same_hash, 1_000_000), trusted=True) == same_hash


def test_lone_surrogates_do_not_reach_the_judge() -> None:
    across("\ud800").encode()


def test_damaged_bytes_raise_nothing_but_not_data() -> None:
    whole = encode({"a": [1, (2.0, "x"), None], "b": {3, 4}, "c": b"raw"}, 1000)
    draw = random.Random(0)
    refused = 0
    for _ in range(5000):
        damaged = bytearray(whole[: draw.randrange(len(whole) + 1)] if draw.random() < 0.3 else whole)
        if damaged:
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            decode(bytes(damaged))
        except NotData:
            refused += 1
    assert refused > 1000

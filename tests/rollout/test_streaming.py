"""Text that is shown as it is sampled: never a part of a stop string or half a character, and complete at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from quintet.clock import VirtualClock
from quintet.rollout.streaming import TextStream, held_back, with_signs_of_life


def decode(ids: list[int]) -> str:
    """One byte a token."""
    return bytes(ids).decode(errors="replace")


def shown(text: str, final: str, barriers: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(decode, barriers=barriers)
    parts = [stream.push(byte) for byte in text.encode()]
    return [*parts, stream.finish(final)]


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    assert shown("aé€", "aé€") == ["a", "", "é", "", "", "€", ""]


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    assert shown("xabxabc!", "xabx", ("abc",)) == ["x", "", "", "abx", "", "", "", "", ""]
    assert shown("ab", "ab", ("abc",)) == ["", "", "ab"]  # it never came: the end gives it back


def test_nothing_is_shown_from_a_barrier_on() -> None:
    assert "".join(shown("hm <tool_call>{}", "hm", ("<tool_call>",))) == "hm "


@given(text=st.text(alphabet="abcé€", max_size=30), stop=st.text(alphabet="abc", min_size=1, max_size=4))
def test_the_parts_join_to_the_text_before_the_stop(text: str, stop: str) -> None:
    final = text.partition(stop)[0]
    parts = shown(text if stop not in text else final + stop, final, (stop,))
    assert "".join(parts) == final
    assert all("\ufffd" not in part for part in parts)


def test_held_back_is_the_longest_possible_beginning() -> None:
    assert held_back("xxab", ["abc", "bq"]) == 2
    assert held_back("xxb", ["abc", "bq"]) == 1
    assert held_back("abc", []) == 0


def test_a_quiet_stream_shows_signs_of_life_and_loses_nothing() -> None:
    clock = VirtualClock()

    async def events() -> AsyncIterator[str]:
        yield "a"
        await clock.sleep(25.0)
        yield "b"

    async def program() -> list[str | None]:
        return [event async for event in with_signs_of_life(events(), 10.0)]

    assert clock.run(program()) == ["a", None, None, "b"]


def test_closing_early_closes_what_was_being_read() -> None:
    closed = []

    async def events() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(100)
        finally:
            closed.append(True)

    async def program() -> None:
        source = events()
        reading = with_signs_of_life(source, 0.01)
        assert [await anext(reading), await anext(reading)] == [1, None]
        await reading.aclose()
        await source.aclose()

    asyncio.run(program())
    assert closed == [True]

"""From a response to the program in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quintet.reward.extract import after_thinking

_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,})[ \t]*+(?P<info>[^`\n]*)$", re.MULTILINE)
_PYTHON = frozenset({"python", "py", "python3"})
_FIELD = re.compile(r"\{(code|prompt)\}")


def last_block(response: str) -> str | None:
    """The last complete fenced block after the thinking part: of those marked as Python, else of the unmarked ones.

    A block that the end of the text cuts off is none.
    """
    found: dict[bool, str] = {}
    for info, code in _blocks(after_thinking(response)):
        language = info.split()[0].lower() if info.strip() else ""
        if language in _PYTHON or not language:
            found[language in _PYTHON] = code
    return found.get(True, found.get(False))


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(info string, content) of complete fenced blocks, in order."""
    opened: re.Match[str] | None = None
    for mark in _FENCE.finditer(text):
        if opened is None:
            opened = mark
        elif _closes(mark, opened):
            yield opened["info"], text[opened.end() + 1 : mark.start()]
            opened = None


def _closes(mark: re.Match[str], opened: re.Match[str]) -> bool:
    same = mark["fence"][0] == opened["fence"][0] and len(mark["fence"]) >= len(opened["fence"])
    return same and not mark["info"].strip()


def fill_template(template: str, code: str, prompt: str) -> str:
    """`{code}` and `{prompt}` replaced, once; other braces stay as they are."""
    return _FIELD.sub(lambda field: code if field[1] == "code" else prompt, template)

"""BM25 over passages in memory (Robertson and Zaragoza 2009, k1 = 1.5, b = 0.75)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from quintet.types import QuintetError

_WORD = re.compile(r"\w+")
_K1, _B = 1.5, 0.75


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Corpus:
    """Passages and their inverted index."""

    def __init__(self, passages: Iterable[str]) -> None:
        self.passages = list(passages)
        if not self.passages:
            raise QuintetError("search: the corpus has no passage")
        counts = [Counter(words(passage)) for passage in self.passages]
        self._lengths = [sum(count.values()) for count in counts]
        self._mean = max(sum(self._lengths) / len(counts), 1.0)
        self._index: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                self._index.setdefault(word, []).append((number, times))

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """A text file with one passage a paragraph, or JSON lines with a field `text`."""
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".jsonl":
                return cls(str(json.loads(line)["text"]) for line in text.splitlines() if line.strip())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise QuintetError(f"search: the corpus {path} cannot be read: {type(error).__name__}: {error}") from None
        return cls(part.strip() for part in re.split(r"\n\s*\n", text) if part.strip())

    def search(self, query: str, results: int) -> list[str]:
        """The best passages that have a word of the query, best first; ties in the order of the corpus."""
        scores: dict[int, float] = {}
        for word in set(words(query)):
            found = self._index.get(word, [])
            rarity = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                norm = _K1 * (1 - _B + _B * self._lengths[number] / self._mean)
                scores[number] = scores.get(number, 0.0) + rarity * times * (_K1 + 1) / (times + norm)
        best = sorted(scores, key=lambda number: (-scores[number], number))[:results]
        return [self.passages[number] for number in best]

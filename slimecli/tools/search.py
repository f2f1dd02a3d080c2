"""A search over the passages of a file, ranked by BM25 (Robertson et al., TREC-3, 1994), in this process.

score(d, q) = sum over words w of q:  idf(w) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * |d| / mean |d|))
idf(w)      = ln(1 + (N - df + 0.5) / (df + 0.5)),  k1 = 1.2, b = 0.75
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slimecli.data_tools.formats import read_rows
from slimecli.errors import DataError

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Passage:
    """One row of the corpus."""

    text: str
    title: str = ""


class SearchIndex:
    """Word -> the passages that hold it, with their counts."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self.passages = list(passages)
        if not self.passages:
            raise DataError("the corpus has no passage", "see tools.corpus")
        self._holders: dict[str, array[int]] = {}
        """word -> [passage, count, passage, count, ...]"""
        lengths = np.zeros(len(self.passages))
        for number, passage in enumerate(self.passages):
            counts = Counter(words(f"{passage.title} {passage.text}"))
            lengths[number] = counts.total()
            for word, count in counts.items():
                self._holders.setdefault(word, array("I")).extend((number, count))
        self._norms = K1 * (1 - B + B * lengths / max(lengths.mean(), 1.0))

    def search(self, query: str, n: int) -> list[Passage]:
        """The n best passages with a word of the query, best first; of equal ones the earlier."""
        scores = self.scores(query)
        hits = np.flatnonzero(scores)
        best = hits[np.argsort(-scores[hits], kind="stable")[:n]]
        return [self.passages[number] for number in best]

    def scores(self, query: str) -> NDArray[np.float64]:
        """[passages] 0 where there is no word of the query."""
        scores = np.zeros(len(self.passages))
        for word in dict.fromkeys(words(query)):
            holders = self._holders.get(word)
            if holders is None:
                continue
            numbers, counts = np.frombuffer(holders, dtype=np.uintc).reshape(-1, 2).T
            idf = math.log(1 + (len(self.passages) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            scores[numbers] += idf * counts * (K1 + 1) / (counts + self._norms[numbers])
        return scores


def words(text: str) -> list[str]:
    """Words and numbers, in lower case."""
    return _WORD.findall(text.lower())


@lru_cache(maxsize=4)
def open_index(path: str) -> SearchIndex:
    """The index of a corpus file: column `text` (or `contents`, its first line the title), optionally `title`."""
    return SearchIndex(_passage(row, f"{path} row {number}") for number, row in enumerate(read_rows(path), 1))


def _passage(row: dict[str, object], where: str) -> Passage:
    if isinstance(row.get("text"), str):
        return Passage(str(row["text"]), str(row.get("title") or ""))
    if isinstance(row.get("contents"), str):
        title, _, text = str(row["contents"]).partition("\n")
        return Passage(text or title, title.strip('"') if text else "")
    raise DataError(f"{where}: no column `text`", 'a corpus row is {"title": ..., "text": ...}')

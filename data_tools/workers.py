"""Rows rendered and tokenized by several processes; the result is that of one, in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from slimecli.data_tools.formats import Placed
from slimecli.data_tools.prompts import Prompt, render_row
from slimecli.recipe_sections import DataSection

CHUNK = 256
"""rows that a process takes at a time; fewer are not worth a process"""
_given: list[Any] = []


def render_in_processes(rows: Iterable[Placed], section: DataSection, tokenizer: Any) -> Iterator[tuple[str, Prompt]]:
    """(where, prompt) of every row, by `section.workers` processes.

    Raises what the first row in order that cannot be rendered raises.
    """
    chunks = list(_chunks(rows))
    if len(chunks) < 2:
        for where, row in itertools.chain.from_iterable(chunks):
            yield where, render_row(row, section, tokenizer, where)
        return
    # a fork of a process with threads may hang, and torch has some
    context = get_context("spawn")
    count = min(section.workers, len(chunks))
    with ProcessPoolExecutor(count, context, initializer=_begin, initargs=(section, tokenizer)) as pool:
        for chunk, prompts in zip(chunks, pool.map(_render, chunks), strict=True):
            yield from zip((where for where, _ in chunk), prompts, strict=True)


def _chunks(rows: Iterable[Placed]) -> Iterator[list[Placed]]:
    walk = iter(rows)
    while chunk := list(itertools.islice(walk, CHUNK)):
        yield chunk


def _begin(section: DataSection, tokenizer: Any) -> None:
    _given[:] = section, tokenizer


def _render(chunk: list[Placed]) -> list[Prompt]:
    section, tokenizer = _given
    return [render_row(row, section, tokenizer, where) for where, row in chunk]

"""Any source -> validated train.jsonl, holdout.jsonl and sft.jsonl, with a count for every row that was left out.

Rows pass through one by one, by way of a file: what is held of all of them is a hash of each prompt.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from slimecli import files
from slimecli.data_tools.columns import Item, read_item, with_template
from slimecli.data_tools.conversations import tokens_and_mask
from slimecli.data_tools.demonstrations import load_demonstration
from slimecli.data_tools.formats import Placed, Row, dump_row, placed_rows
from slimecli.data_tools.prompts import render_prompt
from slimecli.data_tools.sources import level_args, open_source
from slimecli.errors import DataError, UsageError
from slimecli.recipe_sections import DataSection, SftSection
from slimecli.seeds import derive_seed

MAX_DRAWS_PER_ROW = 20
"""draws per wanted row after which a generator that repeats itself counts as exhausted"""


@dataclass
class Report:
    """What became of the rows."""

    kept: dict[str, int] = field(default_factory=dict)
    """file stem (train, holdout, sft) -> rows"""
    dropped: Counter[str] = field(default_factory=Counter)
    """reason -> rows"""
    examples: list[str] = field(default_factory=list)
    """the first broken lines, with file and line"""
    length_checked: bool = False
    """whether prompt lengths were measured; false when no tokenizer exists yet"""

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as it stands in DONE.json."""
        return asdict(self) | {"dropped": dict(sorted(self.dropped.items()))}


def prepare(
    section: DataSection,
    sft: SftSection,
    out: Path,
    *,
    seed: int,
    tokenizer: Any = None,
    exclude: Sequence[tuple[str, DataSection]] = (),
) -> Report:
    """Write train.jsonl, holdout.jsonl and sft.jsonl into the existing folder `out`.

    The columns keep the names that `section` gives them. The same input and seed give the same bytes.

    Args:
        seed: decides the generated rows, which rows are held out, and the demonstrations.
        tokenizer: measures prompts against max_prompt_tokens; None skips that check and says so in the report.
        exclude: evaluation files and how they are read; rows with a prompt of theirs are dropped.
    """
    report = Report(length_checked=tokenizer is not None)
    excluded = {key for path, how in exclude for key in _keys_of(path, how)}
    if not (section.source or section.train or sft.data):
        raise UsageError("the recipe names no data", "set data.train=FILE or data.source=reasoning_gym:TASK")
    with _Spool(out) as rows, _Spool(out) as held:
        screen = _Screen(section, sft, tokenizer, report, excluded, held)
        if section.source or section.train:
            for row in _generated(section, seed, screen) if section.source else _from_file(section, screen):
                rows.add(row)
        train, holdout = _split(rows, section, seed, report)
        _write(out, "train", train(), report)
        _write(out, "holdout", holdout(), report)
        held_out = {_key(row, section) for row in map(json.loads, holdout())}
        if sft.data:
            conversations = _not_held_out(_sft_file(sft.data, section, screen), section, report, held_out)
        elif section.demonstrations:
            conversations = _demonstrations(map(json.loads, train()), section, seed)
        else:
            conversations = _not_held_out(map(json.loads, held), section, report, held_out)
        _write(out, "sft", map(dump_row, conversations), report)
    if not report.kept.get("train") and not report.kept.get("sft"):
        raise DataError(f"no row is left: {_reasons(report)}", "look at the first rows and at the column names")
    return report


class _Spool:
    """Rows on disk, without a name: written once, read as often as wanted."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by __exit__
        self._count = 0

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._count

    def add(self, row: Row) -> None:
        """One row more."""
        self._file.write(dump_row(row))
        self._count += 1

    def __iter__(self) -> Iterator[bytes]:
        """Its lines, one walk at a time."""
        self._file.seek(0)
        return iter(self._file)


def _write(out: Path, stem: str, lines: Iterator[bytes], report: Report) -> None:
    """A file of these lines; none where there are none."""
    first = next(lines, None)
    if first is None:
        return
    report.kept[stem] = 1

    def counted() -> Iterator[bytes]:
        yield first
        for line in lines:
            report.kept[stem] += 1
            yield line

    files.write_parts(out / f"{stem}.jsonl", counted())


@dataclass
class _Screen:
    """Decides row by row what is kept; remembers prompts seen."""

    section: DataSection
    sft: SftSection
    tokenizer: Any
    report: Report
    excluded: set[str]
    conversations: _Spool
    """whole conversations of rows that have no prompt of their own, or both"""
    seen: set[str] = field(default_factory=set)
    """keys, see _canonical"""

    def keep(self, row: Row, where: str, need: str = "prompt") -> Row | None:
        """The row with just the columns that are used, or None; the reason is counted."""
        item = read_item(row, self.section, where, need=need)
        try:
            reason = self._reason(item, where)
        except DataError as error:
            told = error.what if where in error.what else f"{where}: {error.what}"
            raise DataError(told, error.fix) from error
        if reason:
            self.report.dropped[reason] += 1
            return None
        return _used_columns(item, self.section)

    def _reason(self, item: Item, where: str) -> str:
        content = item.prompt if item.prompt is not None else item.messages
        if _is_blank(content):
            return "empty prompt"
        if item.prompt is not None and self.section.label_key and not (item.label or "").strip():
            return "missing label"
        if item.messages is not None and not any(m["role"] == "assistant" for m in item.messages):
            return "no assistant message"
        key = _canonical(content)
        asked = _conversation_prompt(item.messages) if item.prompt is None and item.messages is not None else key
        if asked in self.excluded:
            return "overlap with evaluation"
        if key in self.seen:
            return "duplicate"
        self.seen.add(key)
        if self.tokenizer is not None and item.prompt is not None:
            text = render_prompt(item, self.section, self.tokenizer, where)
            if len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) > self.section.max_prompt_tokens:
                return "too long"
        if self.tokenizer is not None and item.messages is not None and self.sft.steps:
            tokens, mask = tokens_and_mask(item.messages, item.tools, self.section, self.tokenizer)
            if self.sft.max_tokens and len(tokens) > self.sft.max_tokens:
                return "conversation too long"
            if 1 not in mask:
                return "no token to learn"
        return ""


def _generated(section: DataSection, seed: int, screen: _Screen) -> Iterator[Row]:
    wanted = section.count + section.holdout
    if not section.count:
        raise UsageError(f"data.source = {section.source!r} without data.count", "set data.count, e.g. 6000")
    levels = level_args(section)
    if not levels:
        yield from _draw(section, section.source_args, derive_seed(seed, "source"), wanted, screen)
    for level, args in enumerate(levels):
        share = wanted // len(levels) + (level < wanted % len(levels))
        for row in _draw(section, args, derive_seed(seed, "source", level), share, screen):
            yield {**row, section.metadata_key: row.get(section.metadata_key, {}) | {"level": level}}


def _draw(section: DataSection, args: dict[str, Any], seed: int, wanted: int, screen: _Screen) -> Iterator[Row]:
    """The first `wanted` usable rows of the generator."""
    found = 0
    number, limit = 0, MAX_DRAWS_PER_ROW * wanted
    for number, drawn in enumerate(open_source(section.source, args, seed), 1):
        # a generated row has slime's own column names; the recipe may have renamed them
        named = {
            section.input_key: drawn["prompt"],
            section.label_key or "label": drawn["label"],
            section.metadata_key: drawn["metadata"],
        }
        row = screen.keep(named, f"{section.source} row {number}")
        if row is not None:
            found += 1
            yield row
        if found == wanted or number == limit:
            break
    if found < wanted:
        among = ", over all levels" if section.curriculum.is_on else ""
        raise DataError(
            f"{section.source} gave {found} usable rows in {number} draws, but {wanted} are wanted "
            f"({section.count} + {section.holdout} held out{among}; arguments: {args}): {_reasons(screen.report)}",
            "lower data.count, or widen the task with data.source_args",
        )


def _from_file(section: DataSection, screen: _Screen) -> Iterator[Row]:
    for number, (where, row) in enumerate(_readable(section.train, screen.report, section.skip_broken), 1):
        try:
            kept = screen.keep(row, where, need="any")
        except DataError as error:
            if not section.skip_broken or number == 1:
                raise
            _count_broken(screen.report, error)
            continue
        if kept is None:
            continue
        if section.messages_key in kept:
            screen.conversations.add(kept)
        if section.input_key in kept:
            yield kept


def _sft_file(path: str, section: DataSection, screen: _Screen) -> Iterator[Row]:
    own = _Screen(section, screen.sft, screen.tokenizer, screen.report, screen.excluded, screen.conversations)
    placed = _readable(path, own.report, section.skip_broken)
    kept = (own.keep(row, where, need="messages") for where, row in placed)
    return (row for row in kept if row is not None)


def _not_held_out(rows: Iterable[Row], section: DataSection, report: Report, held_out: set[str]) -> Iterator[Row]:
    """Conversations whose prompt is not one of the held-out ones."""
    for row in rows:
        if _conversation_prompt(row[section.messages_key]) in held_out:
            report.dropped["overlap with holdout"] += 1
        else:
            yield row


def _readable(path: str, report: Report, skip_broken: bool) -> Iterator[Placed]:
    on_broken = (lambda error: _count_broken(report, error)) if skip_broken else None
    counts: Counter[str] = Counter()
    yield from placed_rows(path, counts, on_broken)
    if counts["blank"]:
        report.dropped["blank line"] += counts["blank"]


def _count_broken(report: Report, error: DataError) -> None:
    report.dropped["broken"] += 1
    if len(report.examples) < 5:
        report.examples.append(error.what)


_Part = Callable[[], Iterator[bytes]]
"""called, it walks over some lines of a spool"""


def _split(rows: _Spool, section: DataSection, seed: int, report: Report) -> tuple[_Part, _Part]:
    """(train, holdout): a seeded choice of rows is held out, both keep the input's order."""
    if section.holdout and len(rows) <= section.holdout:
        raise DataError(
            f"{len(rows)} usable rows cannot give {section.holdout} held-out ones and any to train on: "
            f"{_reasons(report)}",
            "lower data.holdout or bring more data",
        )
    chosen = set(Random(derive_seed(seed, "holdout")).sample(range(len(rows)), section.holdout))
    left = len(rows) - len(chosen)
    if section.count and left < section.count:
        raise DataError(f"{left} usable rows, but data.count = {section.count}: {_reasons(report)}", "lower data.count")
    if section.count and left > section.count:
        report.dropped["over data.count"] = left - section.count
    most = section.count or None
    return (
        lambda: itertools.islice((line for i, line in enumerate(rows) if i not in chosen), most),
        lambda: (line for i, line in enumerate(rows) if i in chosen),
    )


def _demonstrations(train: Iterable[Row], section: DataSection, seed: int) -> Iterator[Row]:
    write = load_demonstration(section.demonstrations, section.demonstration_args)
    for number, row in enumerate(train):
        canonical = {"label": row.get(section.label_key), "metadata": row.get(section.metadata_key, {})}
        answer = write(canonical, Random(derive_seed(seed, "demonstration", number)))
        prompt = row[section.input_key]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        extra = {section.tool_key: row[section.tool_key]} if section.tool_key in row else {}
        # a conversation is shown as it stands, a prompt within the template
        yield {section.messages_key: [*with_template(messages, section.prompt_template), *said], **extra}


def _used_columns(item: Item, section: DataSection) -> Row:
    values = {
        section.input_key: item.prompt,
        section.label_key: item.label,
        section.metadata_key: item.metadata or None,
        section.tool_key: item.tools,
        section.messages_key: item.messages,
    }
    return {k: v for k, v in values.items() if k and v is not None}


def _keys_of(path: str, section: DataSection) -> Iterator[str]:
    for where, row in placed_rows(path):
        item = read_item(row, section, where, need="")
        if item.prompt is not None:
            yield _canonical(item.prompt)


def _key(row: Row, section: DataSection) -> str:
    return _canonical(row[section.input_key])


def _conversation_prompt(messages: list[dict[str, Any]]) -> str:
    first_answer = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    return _canonical(messages[:first_answer])


def _canonical(content: Any) -> str:
    """A key equal for prompts that differ only in white space, or in being text instead of one user message."""
    return hashlib.blake2b(_plain(content).encode(), digest_size=16).hexdigest()


def _plain(content: Any) -> str:
    if isinstance(content, list):
        messages = [m for m in content if m.get("role") != "system"]
        if len(messages) == 1 and isinstance(messages[0].get("content"), str):
            content = messages[0]["content"]
        else:
            return json.dumps(messages, sort_keys=True, ensure_ascii=False)
    return " ".join(str(content).split())


def _is_blank(content: Any) -> bool:
    if isinstance(content, list):
        return not any(m.get("content") or m.get("tool_calls") for m in content)
    return not str(content or "").strip()


def _reasons(report: Report) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(report.dropped.items()) if n) or "nothing was dropped"

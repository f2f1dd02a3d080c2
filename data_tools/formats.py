"""Rows of .jsonl, .parquet, .csv and .json files and of folders in the hub's layout.

A place may end in a slice, `FILE@[start:end]`; a folder may say what is wanted of it, `DIR#SUBSET/SPLIT`.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from slimecli.data_tools.folders import SUFFIXES, dataset_files
from slimecli.errors import DataError, UsageError

Row = dict[str, Any]
Placed = tuple[str, Row]
"""where a row stands, for error texts, and the row"""
HUB = "hf:"
"""how places begin that lie on the hub: hf://OWNER/NAME; see slimecli.weights.datasets"""

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<end>-?\d*)\]", re.DOTALL)


def split_slice(path: str) -> tuple[Path, slice]:
    """`FILE@[a:b]` -> (FILE, slice(a, b)); bounds may be missing or negative."""
    match = _SLICE.fullmatch(path)
    if match is None:
        if "@[" in path:
            raise UsageError(f"{path!r} has an unreadable slice", "write FILE@[start:end], e.g. data.jsonl@[0:100]")
        return Path(path), slice(None)
    bounds = []
    for name in ("start", "end"):
        text = match[name]
        if text == "-":
            raise UsageError(f"{path!r}: {name} of the slice is '-'", "write FILE@[start:end], e.g. data.jsonl@[-100:]")
        bounds.append(int(text) if text else None)
    return Path(match["path"]), slice(*bounds)


def read_rows(
    path: str,
    counts: Counter[str] | None = None,
    on_broken: Callable[[DataError], None] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a file, one dict each, in order; see `placed_rows`."""
    for _, row in placed_rows(path, counts, on_broken):
        yield row


def placed_rows(
    path: str,
    counts: Counter[str] | None = None,
    on_broken: Callable[[DataError], None] | None = None,
) -> Iterator[Placed]:
    """Yield the rows of a file in order, each with its place: "file:line", or "file row N" of files without lines.

    Args:
        path: file or folder, with optional slice. The slice counts rows, not lines.
        counts: receives how many blank lines were skipped, under "blank".
        on_broken: called for a broken line, which is then left out; None raises at the first one.

    Raises DataError naming file, line and column; also when nothing is left to yield.
    """
    place, wanted = split_slice(path)
    seen: Counter[str] = counts if counts is not None else Counter()
    broken: list[DataError] = []
    tell = _noting(on_broken, broken)
    rows = itertools.chain.from_iterable(_file_rows(file, seen, tell) for file in data_files(place))
    empty = True
    for placed in _take(rows, wanted):
        empty = False
        yield placed
    if empty:
        raise _no_rows(f"{path} selects no rows" if wanted != slice(None) else f"{place} has no rows", broken)


def _noting(
    on_broken: Callable[[DataError], None] | None, broken: list[DataError]
) -> Callable[[DataError], None] | None:
    """The same, with the first error kept in `broken`."""
    if on_broken is None:
        return None

    def tell(error: DataError) -> None:
        if not broken:
            broken.append(error)
        on_broken(error)

    return tell


def _no_rows(what: str, broken: list[DataError]) -> DataError:
    if broken:
        return DataError(f"{what}: what was read is broken; the first: {broken[0].what}", broken[0].fix)
    return DataError(what, "check how the file was made; each line must be one JSON object")


def data_files(place: Path) -> list[Path]:
    """The files behind a path: itself, or of a folder those of the split that follows `#` (default: train)."""
    if str(place).startswith(HUB):
        raise UsageError(f"{place} is on the hub", "this command reads local data: slime download --dataset NAME")
    if place.is_file():
        if place.suffix not in SUFFIXES:
            raise UsageError(f"{place}: unknown data format {place.suffix!r}", f"use a {', '.join(SUFFIXES)} file")
        return [place]
    folder, _, choice = str(place).partition("#")
    if Path(folder).is_dir():
        return dataset_files(Path(folder), choice)
    raise UsageError(f"no data file {place}", "check the path; it is relative to the current folder")


def _file_rows(file: Path, counts: Counter[str], on_broken: Callable[[DataError], None] | None) -> Iterator[Placed]:
    if file.suffix == ".csv":
        return _csv_rows(file)
    if file.suffix == ".jsonl":
        return _jsonl_rows(file, counts, on_broken)
    rows = _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)
    return ((f"{file} row {number}", row) for number, row in enumerate(rows, 1))


def _csv_rows(file: Path) -> Iterator[Placed]:
    """Rows of a table whose first line names the columns; every value is text."""
    with file.open(encoding="utf-8-sig", newline="") as handle:
        reader = csv.DictReader(handle, restkey="", strict=True)
        try:
            for row in reader:
                if "" in row or None in row.values():
                    raise DataError(
                        f"{file}:{reader.line_num}: the row has not as many values as the "
                        f"{len(reader.fieldnames or ())} columns of the first line",
                        "a value with a comma or a line break stands in double quotes",
                    )
                yield f"{file}:{reader.line_num}", row
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{file}:{reader.line_num + 1}: not a CSV row: {error}", "mend the line") from None


def _json_rows(file: Path) -> Iterator[Row]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        where = f":{error.lineno}:{error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{file}{where}: not valid JSON: {error}", "mend the file") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"{file} is not a list of objects", 'write [{"prompt": ...}, ...], or one object a line (.jsonl)'
        )
    yield from rows


def _take(rows: Iterable[Placed], wanted: slice) -> Iterable[Placed]:
    if (wanted.start or 0) < 0 or (wanted.stop or 0) < 0:
        return list(rows)[wanted]
    return itertools.islice(rows, wanted.start, wanted.stop)


def _jsonl_rows(file: Path, counts: Counter[str], on_broken: Callable[[DataError], None] | None) -> Iterator[Placed]:
    with file.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            if not raw.strip():
                counts["blank"] += 1
                continue
            row = _row_of(raw, f"{file}:{number}", on_broken)
            if row is not None:
                yield f"{file}:{number}", row


def _row_of(raw: bytes, where: str, on_broken: Callable[[DataError], None] | None) -> Row | None:
    """One JSON line -> dict; None for a broken one that `on_broken` was told of."""
    try:
        return parse_line(raw, where)
    except DataError as error:
        if on_broken is None:
            raise
        on_broken(error)
        return None


def read_lines(
    lines: Iterable[bytes], name: str, on_broken: Callable[[DataError], None] | None = None
) -> Iterator[Placed]:
    """Yield ("name:line", row) for JSON lines that come from anywhere.

    Args:
        on_broken: called for a broken line, which is then left out; None raises at the first one.

    Raises DataError also when nothing is left to yield.
    """
    empty = True
    broken: list[DataError] = []
    tell = _noting(on_broken, broken)
    for number, raw in enumerate(lines, 1):
        row = _row_of(raw, f"{name}:{number}", tell) if raw.strip() else None
        if row is not None:
            empty = False
            yield f"{name}:{number}", row
    if empty:
        raise _no_rows(f"{name} has no rows", broken)


def parse_line(raw: bytes, where: str) -> Row:
    """One JSON line -> dict.

    Args:
        raw: the line as it stands in the file.
        where: "file:line", the start of every error text.
    """
    try:
        text = raw.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}:{error.start + 1}: not UTF-8 text (byte 0x{raw[error.start]:02x})",
            "convert the file, e.g. `iconv -f latin1 -t utf-8`",
        ) from None
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}:{error.colno}: not valid JSON: {error.msg}: {_excerpt(text, error.pos)}",
            "mend or delete the line; every line is one JSON object",
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"{where}:1: the line is a JSON {type(row).__name__}, not an object",
            'write {"prompt": ..., "label": ...}, one object a line',
        )
    if "\\ud" in text or "\\uD" in text:
        _refuse_lone_surrogates(row, where)
    return row


def _refuse_lone_surrogates(row: Row, where: str) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"{where}:1: the line holds half of a surrogate pair (\\ud800-\\udfff), which is not text",
            "write the character itself, or both halves",
        ) from None


def _excerpt(text: str, position: int) -> str:
    return repr(text[max(0, position - 20) : position + 20])


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable parquet file: {error}", "download or write it again") from None


def dump_rows(rows: Iterable[Row]) -> bytes:
    """Rows -> JSON lines; equal rows give equal bytes (keys sorted)."""
    return b"".join(map(dump_row, rows))


def dump_row(row: Row) -> bytes:
    """One row -> its JSON line."""
    return f"{json.dumps(row, sort_keys=True, ensure_ascii=False)}\n".encode()

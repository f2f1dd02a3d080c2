"""The proof that a conversion is right: hashes of every tensor as read, as written and as read back."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import platform
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from slimecli import __version__, files
from slimecli.errors import DataError
from slimecli.weights.ledger import Ledger, scan
from slimecli.weights.meter import Meter
from slimecli.weights.pieces import PIECE, Source, cut
from slimecli.weights.pipeline import Carrier, Workers

CERTIFICATE = "certificate.json"
_BATCH = 256
"""small tensors that are read in one go"""


def read_back(source: Source, names: Iterable[str], workers: Workers) -> Ledger:
    """Hashes of all tensors as they are read now."""
    ledger, ordered = Ledger(), list(names)
    total = sum(math.prod(source.shape(name)) * source.dtype(name).itemsize for name in ordered)
    meter = Meter("verify", total)

    def check(batch: list[tuple[str, int, int]]) -> None:
        for name, low, high in batch:
            kind = source.dtype(name)
            out = workers.buffer((high - low) * kind.itemsize)
            source.read_into(name, low, high, out)
            nbytes = math.prod(source.shape(name)) * kind.itemsize
            meter.advance(len(out))
            ledger.add(name, nbytes, scan(out, low * kind.itemsize, torch.uint8))

    with meter, contextlib.closing(workers.each(_batches(source, ordered), check)) as done:
        for _ in done:
            pass
    return ledger


def _batches(source: Source, names: Iterable[str]) -> Iterator[list[tuple[str, int, int]]]:
    """Pieces of tensors (name, first element, end), several of them where they are small."""
    batch: list[tuple[str, int, int]] = []
    size = 0
    for name in names:
        low, itemsize = 0, source.dtype(name).itemsize
        for _, block in cut(source.shape(name), itemsize):
            count = math.prod(block)
            batch.append((name, low, low + count))
            low, size = low + count, size + count * itemsize
            if size >= PIECE or len(batch) == _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def compare(carrier: Carrier, found: Source, back: Ledger) -> None:
    """Raise DataError unless what was read back is what was written, bit for bit."""
    expected, got = carrier.written.hashes(), back.hashes()
    for name, value in expected.items():
        kind = carrier.kinds[name]
        if found.dtype(name) != kind or got.get(name) != value:
            there = f"{found.dtype(name)} {got.get(name)}"
            raise DataError(
                f"verification: {name} was written as {kind} {value} and reads back as {there}",
                "the disk or its driver is at fault, or this is a bug: convert again and compare",
            )


def certify(
    folder: Path, carrier: Carrier, shapes: dict[str, tuple[int, ...]], back: Ledger | None, head: dict[str, Any]
) -> dict[str, Any]:
    """Write certificate.json; returns its head, which goes into DONE.json.

    Args:
        shapes: HF name -> shape.
        back: what was read back; None: nothing was.
        head: facts about the conversion.
    """
    written, read = carrier.written.hashes(), carrier.read.hashes()
    result = back.hashes() if back else {}
    rows = {}
    for name, shape in shapes.items():
        kind, stored = carrier.kinds[name], carrier.source.dtype(name)
        rows[name] = {
            "shape": list(shape),
            "dtype": _word(kind),
            "source": read.get(name, written[name]),
            "result": result.get(name),
        }
        if kind != stored:
            rows[name]["source_dtype"] = _word(stored)
    whole = {**head, "tensors": len(rows), "verified": back is not None, "made_by": tools()}
    files.write_json(
        folder / CERTIFICATE, {**whole, "hash": "multilinear-64, slimecli.weights.fingerprint", "weights": rows}
    )
    return whole


def tools() -> dict[str, str]:
    """Versions of what did the work."""
    made = {"slime": __version__, "torch": importlib.metadata.version("torch"), "python": platform.python_version()}
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError):
            made["revision"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return made


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

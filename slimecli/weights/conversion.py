"""What both directions of a conversion have in common: write, re-read, certify, commit."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimecli import __version__, console
from slimecli.errors import UsageError
from slimecli.model_specs import ModelSpec
from slimecli.weights.certificate import certify, compare, read_back
from slimecli.weights.ledger import Ledger
from slimecli.weights.logprobs import compare_logprobs
from slimecli.weights.maps.rule import Rule
from slimecli.weights.partial import Partial, finished, partial_folder
from slimecli.weights.pieces import Source
from slimecli.weights.pipeline import Carrier, Packer, Workers

MAX_JOBS = 8
"""threads by default, however many cores there are: each has up to three pieces in memory"""


def default_jobs() -> int:
    """One thread more than there are cores, as one waits for the disk."""
    return min(MAX_JOBS, len(os.sched_getaffinity(0)) + 1)


@dataclass(frozen=True)
class Conversion:
    """One conversion, planned."""

    source: Path
    """folder of the weights"""
    like: Path
    """folder of config and tokenizer"""
    out: Path
    spec: ModelSpec
    options: dict[str, Any]
    """what the result depends on besides the source, JSON-ready"""
    plan: Packer
    finish: Callable[[Path], None]
    """writes what is small: index, metadata, config, tokenizer"""
    reopen: Callable[[Path], Source]
    """the result, opened for reading and checked as far as its headers tell"""

    def identity(self) -> dict[str, Any]:
        """What an unfinished result must agree with to be continued."""
        folders = {str(f.resolve()): stamps(f) for f in (self.source, self.like)}
        mark = hashlib.blake2b(digest_size=8)
        for task in self.plan.tasks:
            mark.update(f"{task.file} {task.offset} {task.size} {len(task.spans)};".encode())
        return {**self.options, "source": folders, "slime version": __version__, "plan": mark.hexdigest()}


def convert(what: Conversion, carrier: Carrier, begin: float, *, verify: bool, jobs: int) -> dict[str, Any]:
    """Do it.

    Args:
        begin: time.perf_counter() at the start.
        jobs: threads; 0: default_jobs().

    Returns what DONE.json holds.
    """
    target = what.out.resolve()
    for used in (what.source.resolve(), what.like.resolve()):
        if target == used:
            raise UsageError(f"{what.out} is the source itself", "name another --out")
        if target in used.parents or used in target.parents:
            raise UsageError(f"--out {what.out} lies in, or contains, what is converted ({used})", "name another --out")
    identity = what.identity()
    done = finished(what.out, identity)
    if done is not None and (done["verified"] or not verify):
        console.note(f"{what.out} holds this very conversion already: nothing to do")
        return done
    workers = Workers(jobs or default_jobs())
    with OneThreadEach(), partial_folder(what.out, identity) as partial:
        reused = partial.write(what.plan, carrier, workers)
        wrote = time.perf_counter()
        what.finish(partial.folder)
        notes = _prove(what, carrier, partial, workers if verify else None)
        end = time.perf_counter()
        seconds = {"seconds": round(end - begin, 3), "seconds_verifying": round(end - wrote, 3) if verify else 0.0}
        notes |= {**seconds, "bytes": sum(size for _, size in what.plan.files), "bytes_reused": reused}
        partial.commit({**notes, "identity": identity})
    return notes


def _prove(what: Conversion, carrier: Carrier, partial: Partial, workers: Workers | None) -> dict[str, Any]:
    """Verify, unless told not to, and write the certificate; returns its head."""
    names = list(carrier.kinds)
    head: dict[str, Any] = {
        "to": what.options["to"],
        "source": str(what.source),
        "family": what.spec.family.model_type,
        "params": what.spec.params,
    }
    back: Ledger | None = None
    if workers is not None:
        partial.forget_cache()
        result = what.reopen(partial.folder)
        try:
            back = read_back(result, names, workers)
            compare(carrier, result, back)
            head["logprob_check"] = compare_logprobs(what.like, carrier, result)
        finally:
            result.close()
    shapes = {name: carrier.source.shape(name) for name in names}
    return certify(partial.folder, carrier, shapes, back, head)


class OneThreadEach:
    """Torch's own threads rest meanwhile: each worker is one."""

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self._before)


def carrier_of(source: Source, kinds: dict[str, torch.dtype]) -> Carrier:
    """A carrier with empty ledgers."""
    return Carrier(source, kinds, {name: math.prod(source.shape(name)) for name in kinds}, Ledger(), Ledger())


def kinds_of(
    source: Source, rules: Iterable[Rule], dtype: torch.dtype | None, names: Sequence[str] = ()
) -> dict[str, torch.dtype]:
    """HF name -> dtype in the result; fp8 values and their scales are never cast.

    Args:
        names: of the result, where these are not just those of the rules.
    """
    kept = {name for rule in rules for name in rule.hf if rule.keep_dtype}
    ordered = names or [name for rule in rules for name in rule.hf]
    known = {name for rule in rules for name in rule.hf}
    out = {}
    for name in ordered:
        stored = source.dtype(name)
        fixed = name in kept or name not in known or not stored.is_floating_point or stored.itemsize == 1
        out[name] = stored if dtype is None or fixed else dtype
    return out


def word(dtype: torch.dtype | None) -> str | None:
    """Name of a dtype."""
    return str(dtype).removeprefix("torch.") if dtype else None


def stamps(folder: Path) -> dict[str, list[int]]:
    """Sizes and times of a folder's files: another content has others."""
    stats = {p.name: p.stat() for p in sorted(folder.iterdir()) if p.is_file()}
    return {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()}

"""Output files as a list of tasks, each a consecutive part of one file, done by threads in any order.

Where every byte goes is known before the first is written, so the files do not depend on the number of threads, and a
task that was done once need not be done again. Threads are enough: reading, hashing, casting and writing run outside
Python's lock.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from slimecli.errors import DataError
from slimecli.weights import pieces
from slimecli.weights.container import Container
from slimecli.weights.direct import BLOCK, aligned
from slimecli.weights.ledger import Ledger, Scan, scan
from slimecli.weights.pieces import Source

T = TypeVar("T")
R = TypeVar("R")


class Span(NamedTuple):
    """Elements [low, high) of a tensor, as bytes at position `at` of a task."""

    name: str
    """HF name; ZEROS: zero bytes that no tensor has"""
    low: int
    high: int
    at: int


ZEROS = ""
_STEP = 64
"""bytes that a tensor is cut at multiples of: whole lanes of its hash"""


@dataclass(slots=True)
class Task:
    """A consecutive part of one output file."""

    number: int
    file: int
    offset: int
    """in the file (bytes)"""
    size: int = 0
    spans: list[Span] = field(default_factory=list)
    frames: list[tuple[int, Container]] = field(default_factory=list)
    """(position, what stands around the tensor there)"""
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    """(position, bytes that are known already)"""


class Packer:
    """Lays things one after the other into files and cuts the files into tasks."""

    def __init__(self) -> None:
        self.files: list[tuple[str, int]] = []
        """(name, bytes)"""
        self.tasks: list[Task] = []

    def next_file(self, name: str) -> None:
        """Begin a file."""
        self.files.append((name, 0))

    @property
    def position(self) -> int:
        """Bytes in the present file."""
        return self.files[-1][1]

    def _task(self) -> Task | None:
        """The last task of the present file."""
        task = self.tasks[-1] if self.tasks else None
        return task if task is not None and task.file == len(self.files) - 1 else None

    def _room(self, size: int) -> tuple[Task, int]:
        """The task that the next `size` bytes belong to, and their position in it."""
        task = self._task()
        if task is None or task.size + size > pieces.PIECE:
            task = Task(len(self.tasks), len(self.files) - 1, self.position)
            self.tasks.append(task)
        return task, self._grow(task, size)

    def _grow(self, task: Task, size: int) -> int:
        """Where in the task the next `size` bytes are."""
        at = task.size
        task.size += size
        self.files[-1] = (self.files[-1][0], self.position + size)
        return at

    def align(self, step: int) -> None:
        """Zeros up to a multiple of `step`; they end the present task rather than begin another."""
        fill, task = -self.position % step, self._task()
        if fill and task is not None:
            task.literals.append((self._grow(task, fill), bytes(fill)))

    def literal(self, data: bytes) -> None:
        """Bytes that are known already."""
        task, at = self._room(len(data))
        task.literals.append((at, data))

    def stream(self, name: str, count: int, itemsize: int) -> None:
        """The bare bytes of a whole tensor, cut where tasks are full, so that tasks begin and end on whole blocks."""
        low = 0
        while True:
            task = self._task()
            left = pieces.PIECE - (task.size if task is not None else 0)
            fitting = max(0, left) // _STEP * _STEP or pieces.PIECE
            high = min(count, low + fitting // itemsize)
            self.tensor([(name, low, high)], (high - low) * itemsize, itemsize)
            low = high
            if low == count:
                return

    def tensor(self, spans: Iterable[tuple[str, int, int]], nbytes: int, itemsize: int, around: Any = None) -> None:
        """A tensor, or part of one.

        Args:
            spans: (HF name or ZEROS, first element, end).
            around: its Container; None: bare bytes.
        """
        before = len(around.head) if around else 0
        task, at = self._room(around.size if around else nbytes)
        if around:
            task.frames.append((at, around))
        at += before
        for name, low, high in spans:
            task.spans.append(Span(name, low, high, at))
            at += (high - low) * itemsize


@dataclass(frozen=True)
class Carrier:
    """Fills tasks from a source.

    Attributes:
        kinds: HF name -> dtype in the result.
        written: hashes of what is written.
        read: hashes of what is read, for tensors that are cast on the way.
    """

    source: Source
    kinds: dict[str, torch.dtype]
    sizes: dict[str, int]
    """HF name -> elements"""
    written: Ledger
    read: Ledger

    def fill(self, task: Task, out: memoryview) -> str:
        """Put the bytes of a task together and enter their hashes; returns a digest of the tensors' share."""
        for span in task.spans:
            self._take(span, out)
        digest = self.enter(task, out)
        for at, around in task.frames:
            data = at + len(around.head)
            out[at:data] = around.head
            tail = around.tail(out[data : data + around.nbytes])
            out[data + around.nbytes : data + around.nbytes + len(tail)] = tail
        for at, known in task.literals:
            out[at : at + len(known)] = known
        return digest

    def _take(self, span: Span, out: memoryview) -> None:
        if span.name == ZEROS:
            np.frombuffer(out, np.uint8)[span.at : span.at + span.high - span.low] = 0
            return
        kind, stored = self.kinds[span.name], self.source.dtype(span.name)
        view = out[span.at : span.at + (span.high - span.low) * kind.itemsize]
        if kind == stored:
            self.source.read_into(span.name, span.low, span.high, view)
            return
        raw = self.read_raw(span)
        np.frombuffer(view, np.uint8)[:] = raw.to(kind).view(torch.uint8).numpy()

    def read_raw(self, span: Span) -> torch.Tensor:
        """[high - low] elements in their stored dtype, entered as read."""
        stored = self.source.dtype(span.name)
        raw = torch.empty(span.high - span.low, dtype=stored)
        data: memoryview = raw.view(torch.uint8).numpy().data
        self.source.read_into(span.name, span.low, span.high, data)
        total = self.sizes[span.name] * stored.itemsize
        self.read.add(span.name, total, scan(data, span.low * stored.itemsize, stored))
        return raw

    def enter(self, task: Task, out: memoryview, expected: str = "") -> str:
        """Enter the hashes of the tensors in a filled task; a value that is no number is refused by name.

        Args:
            expected: the digest that the task must have; with another one nothing is entered.
        """
        mark, scans = hashlib.blake2b(digest_size=8), list[tuple[str, int, Scan]]()
        for span in task.spans:
            if span.name == ZEROS:
                continue
            kind = self.kinds[span.name]
            size = kind.itemsize
            found = scan(out[span.at : span.at + (span.high - span.low) * size], span.low * size, kind)
            if found.bad:
                self._refuse(span, found.bad)
            mark.update(found.sums.tobytes())
            scans.append((span.name, self.sizes[span.name] * size, found))
        if not expected or mark.hexdigest() == expected:
            for name, nbytes, found in scans:
                self.written.add(name, nbytes, found)
        return mark.hexdigest()

    def _refuse(self, span: Span, bad: int) -> None:
        kind = self.kinds[span.name]
        where = "" if span.high - span.low == self.sizes[span.name] else f" in elements {span.low} to {span.high - 1}"
        fix = "these weights are broken: get them again"
        if kind != self.source.dtype(span.name):
            fix = f"they are broken, or too large for {kind}: choose another --dtype"
        raise DataError(f"{span.name} holds {bad} NaN or infinite value(s){where}", fix)

    def is_filled(self, task: Task, out: memoryview, digest: str) -> bool:
        """Whether bytes read back from a file are a task done before; if so its hashes are entered."""
        for at, around in task.frames:
            data, end = at + len(around.head), at + around.size
            tail = around.tail(out[data : data + around.nbytes])
            if out[at:data] != around.head or out[data + around.nbytes : end] != tail:
                return False
        zeros = [np.frombuffer(out, np.uint8)[s.at : s.at + s.high - s.low] for s in task.spans if s.name == ZEROS]
        if any(out[at : at + len(known)] != known for at, known in task.literals) or any(z.any() for z in zeros):
            return False
        if self.enter(task, out, expected=digest) != digest:
            return False
        for span in task.spans:
            if span.name != ZEROS and self.kinds[span.name] != self.source.dtype(span.name):
                self.read_raw(span)
        return True


class Workers:
    """Threads with a buffer each.

    Args:
        jobs: how many.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._local = threading.local()

    def buffer(self, size: int, offset: int = 0) -> memoryview:
        """`size` bytes of this thread's buffer, which keeps its memory from task to task.

        Args:
            offset: in the file they go to; memory that lies alike is written without a copy.
        """
        if len(getattr(self._local, "room", b"")) < size + BLOCK:
            self._local.room = aligned(max(size, pieces.PIECE) + BLOCK)
        room: memoryview = self._local.room
        return room[offset % BLOCK : offset % BLOCK + size]

    def each(self, items: Iterable[T], work: Callable[[T], R]) -> Generator[tuple[T, R]]:
        """(item, result) as they come; the first error stops the others and is raised when they have stopped."""
        feed, results, stop = iter(items), queue.SimpleQueue[tuple[T, R] | None](), threading.Event()
        lock, errors = threading.Lock(), list[BaseException]()

        def loop() -> None:
            try:
                while not stop.is_set():
                    with lock:
                        item = next(feed, None)
                    if item is None:
                        break
                    results.put((item, work(item)))
            except BaseException as error:  # raised again below, in the caller's thread
                errors.append(error)
                stop.set()
            finally:
                results.put(None)

        threads = [threading.Thread(target=loop, name=f"convert-{i}", daemon=True) for i in range(self.jobs)]
        for thread in threads:
            thread.start()
        try:
            running = len(threads)
            while running:
                found = results.get()
                if found is None:
                    running -= 1
                else:
                    yield found
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

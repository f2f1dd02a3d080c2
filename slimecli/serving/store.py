"""Conversations on disk: JSON lines that are only ever appended, in segments, so that kill -9 costs at most one line.

`turns_NNNNNN.jsonl` holds every answer as it was given, `sessions_NNNNNN.jsonl` every session that has ended, as
samples. A server begins segments of its own; a line without its end, as a kill leaves it, is not there. Sessions that
were open when a server died are taken up again from their turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

from slimecli import console, files
from slimecli.agents.conversation import Conversation, Turn
from slimecli.errors import DataError, SlimeError
from slimecli.rollout.segments import common_prefix
from slimecli.types import Sample

SEGMENT_BYTES = 64 << 20
"""a segment that has grown beyond this is followed by a new one"""
_NAME = re.compile(r"(turns|sessions)_(\d{6})\.jsonl")


class Log:
    """Appends lines to the newest segment of one kind. What is appended outlives the process at once.

    Args:
        durable: it outlives a power cut as well; `append` waits for the disk.
    """

    def __init__(self, folder: Path, kind: str, *, segment_bytes: int = SEGMENT_BYTES, durable: bool = True) -> None:
        self._folder = folder
        self._kind = kind
        self._limit = segment_bytes
        self._durable = durable
        self._handle: FileIO | None = None

    def append(self, record: dict[str, Any]) -> None:
        """One line. Where it cannot be written whole, nothing of it stays: a caller who tries again doubles nothing."""
        line = json.dumps(record, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        with files.explain_disk_errors(self._folder):
            if self._handle is None or self._handle.tell() > self._limit:
                self._handle = self._begin()
            handle, before = self._handle, self._handle.tell()
            if os.fstat(handle.fileno()).st_nlink == 0:
                raise SlimeError(f"{self._folder} was removed while it was recorded into", "start the server anew")
            try:
                _write(handle, line)
                if self._durable:
                    os.fsync(handle.fileno())
            except OSError:
                handle.truncate(before)
                handle.seek(before)
                raise

    def _begin(self) -> FileIO:
        self.close()
        number = max((n for n, _ in segments(self._folder, self._kind)), default=0) + 1
        handle = FileIO(self._folder / f"{self._kind}_{number:06d}.jsonl", "x")
        files.sync_folder(self._folder)
        return handle

    def close(self) -> None:
        """End the segment. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


def _write(handle: FileIO, data: bytes) -> None:
    """All of it; a disk that fills up takes a part first."""
    rest = memoryview(data)
    while rest:
        rest = rest[handle.write(rest) :]


def segments(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """(number, file), oldest first."""
    found = [(m, p) for p in folder.glob(f"{kind}_*.jsonl") if (m := _NAME.fullmatch(p.name))]
    return sorted((int(m[2]), p) for m, p in found)


def read_from(path: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """(record, offset after it) of every whole line from `offset` (bytes) on."""
    with path.open("rb") as handle:
        handle.seek(offset)
        for line in handle:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{path} is damaged before byte {offset}: {error}", "restore it from a copy") from None
            yield record, offset


class LiveStore:
    """What a recording server writes. One server at a time: the folder has a lock that the kernel releases.

    Args:
        folder: RunDir.live_dir.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        with files.explain_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = self._take_lock()
        self._turns = Log(folder, "turns", segment_bytes=segment_bytes, durable=False)
        self._sessions = Log(folder, "sessions", segment_bytes=segment_bytes)
        self._kept: set[str] = set()
        """uids of open sessions that stand among the turns"""
        self._unmarked: list[dict[str, Any]] = []
        """ends that could not be written among the turns yet"""

    def _take_lock(self) -> Any:
        handle = (self._folder / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            handle.close()
            raise SlimeError(
                f"{self._folder} is being recorded into by {owner}", "stop it, or record into another run"
            ) from None
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}")
        handle.flush()
        return handle

    def turn(self, session: Conversation, turn: Turn) -> None:
        """An answer was given. Of its prompt only what the turn before did not say is written."""
        record = asdict(turn)
        before = session.turns[turn.number - 1] if turn.number else None
        kept = common_prefix(before.prompt_ids + before.output_ids, turn.prompt_ids) if before else 0
        record |= {"prompt_ids": turn.prompt_ids[kept:], "kept": kept}
        self._note(session, {"turn": record})

    def opened(self, session: Conversation) -> None:
        """Something was stated of a session, which it has whether it is spoken with now or by the next server."""
        self._note(session, {})

    def _note(self, session: Conversation, more: dict[str, Any]) -> None:
        self._mark()
        about = {"group": session.group, "label": session.base.label, "metadata": session.base.metadata}
        self._turns.append({"session_id": session.id, "uid": session.uid, **about, **more})
        self._kept.add(session.uid)

    def end(self, session: Conversation, samples: list[Sample], why: str) -> None:
        """A session ended. One without an answer leaves nothing to learn from, and is only closed."""
        if samples:
            record = {"uid": session.uid, "group": session.group, "why": why, "samples": [s.to_dict() for s in samples]}
            self._sessions.append({"session_id": session.id, **record})
        if session.uid in self._kept:
            self._kept.remove(session.uid)
            self._unmarked.append({"uid": session.uid, "session_id": session.id, "ended": why})
            try:
                self._mark()
            except SlimeError as error:  # it has ended all the same: `recover` finds it among the sessions
                console.warn(f"the end of session {session.id} is not marked among the turns yet: {error.what}")

    def _mark(self) -> None:
        while self._unmarked:
            self._turns.append(self._unmarked[0])
            del self._unmarked[0]

    def recover(self) -> list[Conversation]:
        """Sessions that were open when the server before ended.

        A session is written before it is marked as ended among the turns: where a kill came between the two, the
        sessions know. What is still open goes to a new segment, and the old ones are removed.
        """
        old = segments(self._folder, "turns")
        found: dict[str, Conversation] = {}
        for _, path in old:
            for record, _ in read_from(path, 0):
                _replay(found, record)
        if found:
            for _, path in segments(self._folder, "sessions")[-2:]:
                for record, _ in read_from(path, 0):
                    found.pop(record["uid"], None)
        for session in found.values():
            self.opened(session)
            for turn in session.turns:
                self.turn(session, turn)
        for _, path in old:
            path.unlink()
        return list(found.values())

    def close(self) -> None:
        """Release the folder. Idempotent."""
        self._turns.close()
        self._sessions.close()
        self._lock.close()


def _replay(found: dict[str, Conversation], record: dict[str, Any]) -> None:
    uid = record["uid"]
    if "ended" in record:
        found.pop(uid, None)
        return
    session = found.setdefault(uid, Conversation(id=record["session_id"], uid=uid))
    session.group = record["group"]
    session.base = Sample(label=record["label"], metadata=record["metadata"])
    values = dict(record.get("turn") or {})
    if values.get("number") != len(session.turns):  # none, or one that a server before us has written twice
        return
    kept = values.pop("kept")
    before = session.turns[-1].prompt_ids + session.turns[-1].output_ids if session.turns else []
    session.turns.append(Turn(**{**values, "prompt_ids": before[:kept] + values["prompt_ids"]}))


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[LiveStore]:
    """A store that is closed at the end."""
    store = LiveStore(folder)
    try:
        yield store
    finally:
        store.close()

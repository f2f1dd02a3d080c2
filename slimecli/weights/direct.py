"""Files read and written past the system's page cache (O_DIRECT), where their file system allows it.

A result is larger than what a cache is for. In the cache every byte of it would be copied and every page of it found,
cleared and written back, which takes more CPU time than all the rest of a conversion and drives out the source; and
reading the result again would read the cache, not the disk.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np

from slimecli.errors import DataError

BLOCK = 4096
"""memory, place in the file and size are multiples of this where the cache is passed by"""
SMALL = 256 << 10
"""fewer bytes than this are read through the cache, where the system reads ahead"""
CHUNK = 1 << 20
"""bytes read at a time: they are still in the CPU's cache when they are copied to where they are wanted"""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_local = threading.local()


class DiskFile:
    """A file that several threads read and write at positions.

    Whole blocks pass the cache by. The blocks at the edges of what is written, which the neighbour's bytes share, do
    not, nor does anything where the file system offers no other way (some network and encrypted ones): the bytes are
    the same.

    Args:
        size: opens it for writing, with so many bytes; None: for reading.
        cached: use the cache throughout, for what may well be in it already.
    """

    def __init__(self, path: Path, size: int | None = None, *, cached: bool = False) -> None:
        self.path = path
        flags = os.O_RDONLY if size is None else os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, flags, 0o644)
        self._direct: int | None = None
        # the system lets one writer at a time into a file's cache, and the others would spin meanwhile
        self._lock = threading.Lock()
        try:
            if size is not None:
                os.ftruncate(self._fd, size)
            if not cached:
                self._direct = _open_direct(path, flags)
        except BaseException:
            self.close()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Put bytes at a position; flush() has them on the disk for good.

        Only data that lie in memory as in the file, at the same remainder of BLOCK, pass the cache by.
        """
        low = min(-offset % BLOCK, len(data))
        high = low + (len(data) - low) // BLOCK * BLOCK
        alike = high > low and _address(data) % BLOCK == offset % BLOCK
        if not (alike and self._write_blocks(offset + low, data[low:high])):
            low = high = len(data)
        with self._lock:
            _write(self._fd, offset, data[:low])
            _write(self._fd, offset + high, data[high:])

    def _write_blocks(self, offset: int, data: memoryview) -> bool:
        """Whether the file system took them past its cache."""
        if self._direct is None:
            return False
        try:
            _write(self._direct, offset, data)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return False
        return True

    def read(self, offset: int, out: memoryview) -> None:
        """Fill `out` from a position."""
        if self._direct is None or len(out) < SMALL:
            read_exactly(self._fd, offset, out, self.path)
            return
        room = _room()
        while len(out):
            before = offset % BLOCK
            blocks = -(-(before + len(out)) // BLOCK)
            try:
                count = os.preadv(self._direct, [room[: blocks * BLOCK]], offset - before) - before
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                read_exactly(self._fd, offset, out, self.path)
                return
            if count <= 0:
                raise _truncated(self.path, offset + len(out))
            count = min(count, len(out))
            out[:count] = room[before : before + count]
            out, offset = out[count:], offset + count

    def pread(self, count: int, offset: int) -> bytes:
        """Up to `count` bytes."""
        return os.pread(self._fd, count, offset)

    def flush(self) -> None:
        """Have everything written so far on the disk."""
        os.fsync(self._fd)

    def forget_cache(self) -> None:
        """Ask the system to drop what it has of the file, so that reading it again reads the disk."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)


def aligned(size: int) -> memoryview:
    """Memory that begins at a multiple of BLOCK."""
    room = np.empty(size + BLOCK, np.uint8).data
    start = -_address(room) % BLOCK
    return room[start : start + size]


def read_exactly(fd: int, offset: int, out: memoryview, path: Path) -> None:
    """Fill `out` from a file."""
    while len(out):
        count = os.preadv(fd, [out], offset)
        if not count:
            raise _truncated(path, offset + len(out))
        out, offset = out[count:], offset + count


def _truncated(path: Path, end: int) -> DataError:
    return DataError(f"{path} is truncated: it ends before byte {end}", "get the file again")


def _write(fd: int, offset: int, data: memoryview) -> None:
    while len(data):
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _open_direct(path: Path, flags: int) -> int | None:
    """The file once more, past the cache; None where that is not offered."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None


def _address(data: memoryview) -> int:
    """Where in memory the data lie."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0] if len(data) else 0
    return address


def _room() -> memoryview:
    """This thread's memory for what is read."""
    if not hasattr(_local, "room"):
        _local.room = aligned(CHUNK)
    room: memoryview = _local.room
    return room

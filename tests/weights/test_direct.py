"""Bytes at any place reach the file and come back, past the cache or through it."""

import errno
import fcntl
import itertools
import os
import random
import threading

import pytest

from slimecli.errors import DataError
from slimecli.weights import direct
from slimecli.weights.direct import BLOCK, DiskFile, aligned

SIZE = 5 * BLOCK + 123


@pytest.fixture(params=["past the cache", "refused at opening", "refused at writing", "through the cache"])
def way(request, monkeypatch):
    """What the file system offers; True where whole blocks are to pass the cache by."""
    real_open, real_write, real_read = os.open, os.pwrite, os.preadv
    monkeypatch.setattr(direct, "SMALL", 1)

    def refuse(*arguments):
        raise OSError(errno.EINVAL, "Invalid argument")

    def is_direct(fd):
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT

    if request.param == "refused at opening":
        monkeypatch.setattr(os, "open", lambda p, f, *m: refuse() if f & os.O_DIRECT else real_open(p, f, *m))
    if request.param == "refused at writing":
        monkeypatch.setattr(os, "pwrite", lambda fd, *a: refuse() if is_direct(fd) else real_write(fd, *a))
        monkeypatch.setattr(os, "preadv", lambda fd, *a: refuse() if is_direct(fd) else real_read(fd, *a))
    return request.param


def alike(data, offset):
    """The same bytes in memory that lies like the file."""
    room = aligned(len(data) + BLOCK)[offset % BLOCK :][: len(data)]
    room[:] = data
    return room


@pytest.mark.parametrize("lies_alike", [True, False])
def test_what_is_written_in_parts_is_read_in_other_parts(tmp_path, way, lies_alike):
    wanted = random.Random(0).randbytes(SIZE)
    cuts = [0, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 4 * BLOCK, SIZE]
    parts = list(itertools.pairwise(cuts))
    file = DiskFile(tmp_path / "f", SIZE, cached=way == "through the cache")
    threads = [
        threading.Thread(
            target=file.write,
            args=(low, alike(wanted[low:high], low) if lies_alike else memoryview(b"x" + wanted[low:high])[1:]),
        )
        for low, high in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.flush()
    file.forget_cache()
    assert (tmp_path / "f").read_bytes() == wanted
    for low, high in [*parts, (0, SIZE), (1, SIZE), (BLOCK, 2 * BLOCK), (SIZE - 1, SIZE), (5, 5)]:
        out = memoryview(bytearray(high - low))
        file.read(low, out)
        assert bytes(out) == wanted[low:high]
    with pytest.raises(DataError, match=rf"f is truncated: it ends before byte {SIZE + 1}"):
        file.read(1, memoryview(bytearray(SIZE)))
    file.close()


def test_whole_blocks_pass_the_cache_by(tmp_path, monkeypatch):
    """Where the file system lets them; what goes through the cache is less than a block at each end."""
    through, real = [], direct._write
    file = DiskFile(tmp_path / "f", SIZE)
    monkeypatch.setattr(
        direct, "_write", lambda fd, at, data: (through.append((fd, at, len(data))), real(fd, at, data))
    )
    file.write(100, alike(bytes(SIZE - 100), 100))
    assert file._direct is not None, "the disk of the tests has no O_DIRECT"
    assert [(at, size) for fd, at, size in through if fd == file._direct] == [(BLOCK, 4 * BLOCK)]
    assert sum(size for fd, _, size in through if fd != file._direct) == BLOCK - 100 + 123
    file.close()


def test_an_error_of_the_disk_is_not_taken_for_a_refusal(tmp_path, monkeypatch):
    file = DiskFile(tmp_path / "f", SIZE)

    def broken(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="Input/output error"):
        file.write(0, alike(bytes(2 * BLOCK), 0))
    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(direct, "SMALL", 1)
    with pytest.raises(OSError, match="Input/output error"):
        file.read(0, memoryview(bytearray(10)))
    file.close()

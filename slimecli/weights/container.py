"""The container that torch.save puts around one contiguous tensor, written and read without copying the tensor.

It is a zip of uncompressed records: a pickle that names dtype, size and strides, and the raw bytes. All but the
checksum is known before the bytes are, so size and place are known, and the bytes go straight to where they belong.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from slimecli.errors import DataError

try:
    from isal.isal_zlib import crc32  # six times as fast; made for the common processors only
except ImportError:
    from zlib import crc32

Shape = tuple[int, ...]
STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
"""dtype -> the class by which a pickle of torch.save names it"""
_DTYPES = {name: dtype for dtype, name in STORAGES.items()}
_ALIGN = 64
"""raw bytes begin at a multiple of this, as torch.save has it"""
_FLAGS = 0x0808
"""names are UTF-8; sizes and checksum follow the bytes"""
_LOCAL, _DESCRIPTOR = struct.Struct("<4s5H3L2H"), struct.Struct("<4s3L")
_CENTRAL, _END, _END64 = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
MAX_BYTES = 1 << 31
"""largest tensor in one container (bytes): beyond 4 GiB the zip would need its 64-bit form"""
_TAIL = 1 << 13
"""bytes at the end of a container that hold its directory"""


@dataclass(frozen=True)
class Container:
    """What stands around the bytes of a contiguous tensor of one dtype and shape."""

    head: bytes
    nbytes: int
    """of the tensor"""
    last: int
    """where the record of the tensor's bytes begins"""
    directory: bytes
    """entries of the other records"""

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        return len(self.head) + self.nbytes + len(self._tail(0))

    def tail(self, data: memoryview) -> bytes:
        """What follows the tensor's bytes: their checksum and the directory."""
        return self._tail(crc32(data))

    def _tail(self, crc: int) -> bytes:
        described = _DESCRIPTOR.pack(b"PK\x07\x08", crc, self.nbytes, self.nbytes)
        directory = self.directory + _entry("data/0", self.last, self.nbytes, crc)
        start = len(self.head) + self.nbytes + len(described)
        return described + directory + _END.pack(b"PK\x05\x06", 0, 0, 4, 4, len(directory), start, 0)


@lru_cache(maxsize=4096)
def container(dtype: torch.dtype, shape: Shape) -> Container:
    """The container of a contiguous tensor."""
    if dtype not in STORAGES:
        raise DataError(f"torch_dist has no {dtype} tensors", "choose another --dtype, bfloat16 for instance")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > MAX_BYTES:
        raise DataError(f"a chunk of {nbytes} bytes is too large", "report this: the conversion was planned wrongly")
    head = directory = b""
    for name, data in (("data.pkl", _pickled(dtype, shape)), ("byteorder", b"little"), ("version", b"3\n")):
        crc = crc32(data)
        directory += _entry(name, len(head), len(data), crc)
        head += _local(name, len(head)) + data + _DESCRIPTOR.pack(b"PK\x07\x08", crc, len(data), len(data))
    return Container(head + _local("data/0", len(head)), nbytes, len(head), directory)


def _local(name: str, start: int) -> bytes:
    """Header before a record's bytes; an extra field fills up to the alignment."""
    path = f"archive/{name}".encode()
    fill = -(start + _LOCAL.size + len(path) + 4) % _ALIGN
    head = _LOCAL.pack(b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(path), fill + 4)
    return head + path + struct.pack("<2sH", b"FB", fill) + b"Z" * fill


def _entry(name: str, start: int, size: int, crc: int) -> bytes:
    """A record's line in the directory."""
    path = f"archive/{name}".encode()
    return _CENTRAL.pack(b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0, crc, size, size, len(path), *(0,) * 5, start) + path


def _pickled(dtype: torch.dtype, shape: Shape) -> bytes:
    """`_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())` in pickle's protocol 2."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<L", len(value)) + value.encode()

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<l", value) if value < 1 << 31 else b"\x8a\x08" + struct.pack("<q", value)

    def numbers(values: Any) -> bytes:
        return b"(" + b"".join(number(v) for v in values) + b"t"

    storage = f"ctorch\n{STORAGES[dtype]}\n".encode() + text("0") + text("cpu") + number(math.prod(shape))
    arguments = b"(" + text("storage") + storage + b"tQ" + number(0) + numbers(shape) + numbers(strides)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"\x89ccollections\nOrderedDict\n)RtR."


class Place(NamedTuple):
    """Where a stored tensor's bytes lie."""

    start: int
    """byte in the container"""
    dtype: torch.dtype
    shape: Shape


class _Reader(pickle.Unpickler):
    """Reads the description of one tensor; nothing else is built, so nothing can run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: arguments
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"unexpected {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def find_tensor(pread: Callable[[int, int], bytes], length: int) -> Place:
    """Where the tensor in a container lies.

    Args:
        pread: (count, offset) -> bytes of the container.
        length: of the container.

    Raises ValueError where this is not the container of one contiguous tensor.
    """
    try:
        records = _directory(pread, length)
        described = next(v for k, v in records.items() if k.endswith("/data.pkl"))
        start, size = _bytes_of(pread, *described)
        (_, dtype, key, _, _), offset, shape, strides, *_ = _Reader(io.BytesIO(pread(size, start))).load()
        root = next(k for k in records if k.endswith("/data.pkl")).removesuffix("data.pkl")
        if records.get(f"{root}byteorder") and pread(6, _bytes_of(pread, *records[f"{root}byteorder"])[0]) != b"little":
            raise ValueError("its bytes are in another order")
        start, size = _bytes_of(pread, *records[f"{root}data/{key}"])
    except (struct.error, StopIteration, LookupError, TypeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"no container of a tensor: {error or type(error).__name__}") from None
    wanted = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    kept = [i for i, n in enumerate(shape) if n != 1]
    if [strides[i] for i in kept] != [wanted[i] for i in kept]:
        raise ValueError("its elements are not in order")
    at = offset * dtype.itemsize
    if at + math.prod(shape) * dtype.itemsize > size:
        raise ValueError("it holds fewer bytes than its shape has")
    return Place(start + at, dtype, tuple(shape))


def _directory(pread: Callable[[int, int], bytes], length: int) -> dict[str, tuple[int, int]]:
    """Record name -> (where it begins, bytes)."""
    first = max(0, length - _TAIL)
    tail = pread(length - first, first)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0:
        raise ValueError("it does not end as one")
    count, size, start = _END.unpack_from(tail, place)[4:7]
    wide = tail.rfind(b"PK\x06\x06", 0, place)
    if wide >= 0:
        count, size, start = _END64.unpack_from(tail, wide)[7:10]
    listing, out, at = pread(size, start) if start < first else tail[start - first :][:size], {}, 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(listing, at)
        stored, name_length, extra, comment, begin = fields[8], fields[10], fields[11], fields[12], fields[16]
        if fields[4] != 0:
            raise ValueError("it is compressed")
        at += _CENTRAL.size
        name = listing[at : at + name_length].decode()
        out[name] = _widened(stored, begin, listing[at + name_length : at + name_length + extra])
        at += name_length + extra + comment
    return out


def _widened(stored: int, begin: int, extra: bytes) -> tuple[int, int]:
    """(where a record begins, bytes), from the 64-bit field where 32 bits are not enough."""
    narrow = 0xFFFFFFFF
    if stored != narrow and begin != narrow:
        return begin, stored
    at = 0
    while struct.unpack_from("<H", extra, at)[0] != 1:
        at += 4 + int(struct.unpack_from("<H", extra, at + 2)[0])
    wide = list(struct.unpack_from(f"<{struct.unpack_from('<H', extra, at + 2)[0] // 8}Q", extra, at + 4))
    if stored == narrow:
        stored = wide[0]
        del wide[:2]  # stored and unpacked size are the same number
    return (wide[0] if begin == narrow else begin), stored


def _bytes_of(pread: Callable[[int, int], bytes], begin: int, size: int) -> tuple[int, int]:
    """Where a record's bytes begin, behind its local header, and how many there are."""
    fields = _LOCAL.unpack(pread(_LOCAL.size, begin))
    return begin + _LOCAL.size + fields[9] + fields[10], size

"""The changes from one version of the weights to the next, as a folder: delta.json and delta.bin.

delta.json: {"format": 1, "version", "base_version", "fingerprint", "base_fingerprint", "bytes", "tensors": {name:
{"dtype", "shape", "encoding", "count", "offset", "nbytes", "digest"}}}. Tensors that did not change are not there;
`digest` is of the whole tensor after the change (weights.fingerprint.tensor_digest). delta.bin holds a zstd frame with
a checksum per tensor, of
    sparse: `count` uint32 distances between changed elements (the first from -1), then their new values;
    xor: every element XOR its old value, which leaves the high bytes of small steps zero.
Numbers are split into byte planes first (all lowest bytes, then all second ones, ...): equal bytes lie together then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from slimecli import files
from slimecli.errors import SlimeError
from slimecli.weights.fingerprint import tensor_digest

FORMAT = 1
LEVEL = 1
"""of zstd"""
POSITION_BYTES = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Pairs = Iterable[tuple[str, torch.Tensor]]


class DeltaRefused(SlimeError):
    """The changes are damaged, or belong to other weights; nothing was applied."""


def write(
    pairs: Pairs,
    base: Mapping[str, torch.Tensor],
    folder: Path,
    about: dict[str, Any],
    digest: Callable[[str, torch.Tensor], str] = tensor_digest,
) -> dict[str, Any]:
    """Write the changes into an existing folder, reading `pairs` once.

    Args:
        pairs: the new weights.
        base: the old ones on the CPU: the same names, dtypes and shapes.
        about: filled by the caller while `pairs` is read: versions and fingerprints; it goes into delta.json.
        digest: of a new tensor, for who has it already.

    Returns delta.json.
    """
    tensors: dict[str, Any] = {}
    offset, changed, total = 0, 0, 0
    with (folder / "delta.bin").open("wb") as handle:
        for name, tensor in pairs:
            new, old = tensor.detach().cpu(), base[name]
            total += new.numel()
            encoding, count, raw = encode(old, new)
            if not count:
                continue
            changed += count
            frame = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(raw)
            handle.write(frame)
            tensors[name] = {
                "dtype": str(new.dtype).removeprefix("torch."),
                "shape": list(new.shape),
                "encoding": encoding,
                "count": count,
                "offset": offset,
                "nbytes": len(frame),
                "digest": digest(name, new),
            }
            offset += len(frame)
    told = {"format": FORMAT, **about, "bytes": offset, "changed": changed, "elements": total, "tensors": tensors}
    files.write_json(folder / "delta.json", told, durable=False)
    return told


def encode(old: torch.Tensor, new: torch.Tensor) -> tuple[str, int, bytes]:
    """(encoding, changed elements, bytes to compress)."""
    before, after = _lanes(old), _lanes(new)
    places = (before != after).nonzero().reshape(-1)
    count, width = places.numel(), after.element_size()
    if count * (width + POSITION_BYTES) >= after.numel() * width or after.numel() >= 2**32:
        return "xor", count, _planes(torch.bitwise_xor(before, after).numpy().view(np.uint8), width).tobytes()
    steps = torch.diff(places, prepend=torch.tensor([-1])).numpy().astype("<u4")
    values = after[places].numpy().view(np.uint8)
    return "sparse", count, _planes(steps.view(np.uint8), POSITION_BYTES).tobytes() + _planes(values, width).tobytes()


def decode(raw: bytes, entry: Mapping[str, Any], old: torch.Tensor) -> torch.Tensor:
    """The new tensor, on the old one's device."""
    before = _lanes(old)
    width, data = before.element_size(), np.frombuffer(raw, np.uint8)
    if entry["encoding"] == "xor":
        flips = torch.from_numpy(_unplaned(data, width)).view(before.dtype).to(old.device)
        return torch.bitwise_xor(before, flips).view(old.dtype).view(old.shape)
    cut = entry["count"] * POSITION_BYTES
    places = np.cumsum(_unplaned(data[:cut], POSITION_BYTES).view("<u4"), dtype=np.int64) - 1
    values = torch.from_numpy(_unplaned(data[cut:], width)).view(before.dtype)
    after = before.clone()
    after[torch.from_numpy(places).to(old.device)] = values.to(old.device)
    return after.view(old.dtype).view(old.shape)


def _lanes(tensor: torch.Tensor) -> torch.Tensor:
    """[n] the elements as integers: bits are compared, so that -0.0 is not 0.0 and NaN is itself."""
    return tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def _planes(octets: Bytes, width: int) -> Bytes:
    return np.ascontiguousarray(octets.reshape(-1, width).T)


def _unplaned(octets: Bytes, width: int) -> Bytes:
    return np.array(octets.reshape(width, -1).T, order="C").reshape(-1)


class Delta:
    """A folder of changes, opened: lengths are checked, contents when they are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.told: dict[str, Any] = files.read_json(folder / "delta.json")
            wanted, version = int(self.told["bytes"]), int(self.told["version"])
            self.tensors: dict[str, dict[str, Any]] = dict(self.told["tensors"])
            self.fingerprint = str(self.told["fingerprint"])
            self.base_fingerprint, self.base_version = str(self.told["base_fingerprint"]), self.told["base_version"]
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise DeltaRefused(f"{folder} holds no changes: {error!r}", _AGAIN) from None
        if (found := self.told.get("format")) != FORMAT:
            raise DeltaRefused(f"{folder} has format {found}, this version of slime reads {FORMAT}", _AGAIN)
        self.version = version
        path = folder / "delta.bin"
        size = path.stat().st_size if path.is_file() else 0
        if size != wanted:
            raise DeltaRefused(f"{path} is cut short: {size} of {wanted} bytes", _AGAIN)

    def check_base(self, fingerprint: str) -> None:
        """Raise unless these are the weights that the changes were taken from."""
        if fingerprint == self.base_fingerprint:
            return
        if fingerprint == self.fingerprint:
            raise DeltaRefused(f"the changes to version {self.version} are applied already", "push the next version")
        raise DeltaRefused(
            f"the changes to version {self.version} are from version {self.base_version} (fingerprint "
            f"{self.base_fingerprint}); held are weights with {fingerprint}",
            "push all weights",
        )

    def applied(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """The new tensor; raises naming it if it does not come out as it was when the changes were taken."""
        new = self.new(name, old)
        if tensor_digest(name, new) != self.tensors[name]["digest"]:
            raise DeltaRefused(f"{name} does not come out as it was sent: its checksum differs", _AGAIN)
        return new

    def new(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """The new tensor, its digest not looked at."""
        entry = self.tensors[name]
        have = [str(old.dtype).removeprefix("torch."), list(old.shape)]
        if have != [entry["dtype"], list(entry["shape"])]:
            raise DeltaRefused(f"{name} is {have}, the changes are for {[entry['dtype'], entry['shape']]}", _AGAIN)
        try:
            return decode(self._read(entry), entry, old)
        except (zstandard.ZstdError, ValueError, IndexError, RuntimeError) as error:
            raise DeltaRefused(f"the changes of {name} are damaged: {error}", _AGAIN) from None

    def _read(self, entry: Mapping[str, Any]) -> bytes:
        with (self.folder / "delta.bin").open("rb") as handle:
            handle.seek(entry["offset"])
            frame = handle.read(entry["nbytes"])
        return zstandard.ZstdDecompressor().decompress(frame)


_AGAIN = "a restart of the run stages all weights anew; see docs/weight-sync.md"

"""Loading weights into a slot model: checked before the first byte is written, fingerprinted after the last."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.engines.embedded.config import DTYPES
from slimecli.engines.embedded.slot_model import SlotModel
from slimecli.errors import SlimeError, nearest
from slimecli.headers import read_index
from slimecli.weights.fingerprint import Fingerprint
from slimecli.weights.quant import Weights, open_weights
from slimecli.weights.quant_scheme import scheme_of

Header = tuple[str, tuple[int, ...], str]
"""(HF name, shape, dtype name)"""


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """Weights on their way into a model."""

    headers: list[Header]
    tensors: Iterable[tuple[str, torch.Tensor]]
    whole: bool = True
    """False: what is not among them stays as it is"""
    how: str = "full"
    """for the receipt"""
    version: str = ""
    """theirs; empty: the one the update names"""
    wanted: str = ""
    """the fingerprint that must come out; empty: the caller compares"""
    bytes_: int | None = None
    """read for them, if that is not their size"""


class WeightsRefused(SlimeError):
    """The weights do not fit the model; nothing was written."""


class WeightBook:
    """Which weights a model holds, in which dtype they came, and whether they are whole.

    `pending` collects names between begin() and end(): an update may come in several parts.

    Args:
        beside: HF name -> memory for a weight that may come along and that the model does without.
    """

    def __init__(self, model: SlotModel, beside: Mapping[str, torch.Tensor] | None = None) -> None:
        self._model = model
        self._live = {**model.live, **(beside or {})}
        self._dtypes: dict[str, torch.dtype] = {}
        self.pending: set[str] | None = None
        self.trouble = "no weights were loaded"
        """why the engine must not generate; empty when all is well"""
        self.held = ""
        """the last fingerprint taken; empty when weights have changed since"""

    def begin(self) -> None:
        """An update in parts starts."""
        if self.pending is not None:
            raise WeightsRefused("a weight update is in progress already", "call end_weight_update first")
        self.pending = set()

    def end(self) -> None:
        """An update in parts is over; what is missing leaves the engine refusing to generate."""
        if self.pending is None:
            raise WeightsRefused("no weight update is in progress", "call begin_weight_update first")
        seen, self.pending = self.pending, None
        missing = sorted(self._required() - seen) if seen else []
        if missing:
            self.trouble = f"the weight update left out {len(missing)} weight(s): {', '.join(missing[:3])}"
            raise SlimeError(self.trouble, "push all weights; until then the engine refuses to generate")

    def forget(self) -> None:
        """The memory of the weights was given back."""
        self.trouble = "the weights were released; push them before generating"
        self.held = ""

    def _required(self) -> set[str]:
        return set(self._model.live)

    def check(self, headers: Iterable[Header], *, whole: bool) -> None:
        """Raise WeightsRefused unless every name is known with this shape and (when `whole`) none is missing."""
        live, aliases = self._live, self._model.aliases
        seen: set[str] = set()
        problems = []
        for name, shape, dtype in headers:
            if name in seen:
                problems.append(f"{name} comes twice")
            seen.add(name)
            known = live.get(aliases.get(name, name))
            if known is None:
                problems.append(f"unknown weight {name!r}{nearest(name, list(live))}")
            elif tuple(known.shape) != tuple(shape):
                problems.append(f"{name} has shape {list(shape)}, this model needs {list(known.shape)}")
            elif dtype not in DTYPES:
                problems.append(f"{name} has dtype {dtype}; this engine takes {', '.join(DTYPES)}")
        missing = sorted(self._required() - seen) if whole else []
        if missing:
            problems.append(f"{len(missing)} weight(s) are missing: {', '.join(missing[:3])}")
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise WeightsRefused("weights refused: " + "; ".join(problems[:5]) + more, "push the weights of this model")

    def load(self, headers: list[Header], tensors: Iterable[tuple[str, torch.Tensor]], *, whole: bool = True) -> int:
        """Copy weights in; returns the bytes read. A failure half-way leaves the engine refusing to generate.

        Args:
            whole: False: weights that are not among them stay as they are.
        """
        if not whole and self.trouble:
            raise WeightsRefused(f"changes cannot be applied: {self.trouble}", "push all weights")
        whole = whole and self.pending is None
        self.check(headers, whole=whole)
        self.held = ""
        self.trouble = "a weight update failed half-way"
        live, aliases = self._live, self._model.aliases
        total = 0
        with torch.no_grad():
            for name, tensor in tensors:
                target = live[aliases.get(name, name)]
                if name in aliases and not torch.equal(tensor.to(target), live[aliases[name]]):
                    self.trouble = f"{name} is tied to {aliases[name]} but was pushed with other values"
                    raise SlimeError(self.trouble, "push the tied weight once")
                target.copy_(tensor)
                self._dtypes[name] = tensor.dtype
                total += tensor.nbytes
        if whole:
            for name in set(self._dtypes) - {h[0] for h in headers}:
                del self._dtypes[name]
        if self.pending is not None:
            self.pending.update(name for name, _, _ in headers)
        self._model.weights_changed()
        self.trouble = ""
        return total

    def fingerprint(self) -> str:
        """Over the live weights under their HF names, in the dtype in which they came where that is exact."""
        self.held = self._mark().hexdigest()
        return self.held

    def digests(self) -> dict[str, str]:
        """One digest per weight."""
        return self._mark().digests()

    def value(self, name: str) -> torch.Tensor:
        """A live weight in the dtype in which it came, if that is exact."""
        tensor = self._live[self._model.aliases.get(name, name)]
        cast = tensor.to(self._dtypes.get(name, tensor.dtype))
        exact = cast.dtype == tensor.dtype or torch.equal(cast.to(tensor.dtype), tensor)
        return cast if exact else tensor

    def is_alias(self, name: str) -> bool:
        """Whether a name is another one of a tied weight."""
        return name in self._model.aliases

    def _mark(self) -> Fingerprint:
        if self.trouble:
            raise SlimeError(f"no fingerprint: {self.trouble}", "push the weights")
        mark = Fingerprint()
        for name in self._dtypes:
            mark.update(name, self.value(name))
        return mark


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def headers_of(tensors: Mapping[str, torch.Tensor]) -> list[Header]:
    """Of tensors in memory."""
    return [(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()]


class FolderWeights:
    """Safetensors of an HF folder; quantised ones are dequantised as they are read."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._quantised = _quantised(folder)
        if self._quantised is not None:
            entries = self._quantised.entries
            self.headers: list[Header] = [(n, e.shape, dtype_name(e.dtype)) for n, e in entries.items()]
            return
        index = read_index(folder)
        names = ["model.safetensors"] if index is None else sorted(set(index.values()))
        absent = [n for n in names if not (folder / n).is_file()]
        if absent:
            raise WeightsRefused(f"{folder} has no {absent[0]}", "name an HF folder with safetensors weights")
        self._stack = contextlib.ExitStack()
        try:
            self._files = [self._stack.enter_context(safe_open(str(folder / n), framework="pt")) for n in names]
        except Exception as error:  # the safetensors library raises its own type for a damaged header
            raise WeightsRefused(f"{folder}: {error}", "write the weights again") from None
        self.headers = []
        for file in self._files:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                self.headers.append((name, tuple(part.get_shape()), _SAFE_DTYPES.get(part.get_dtype(), "unknown")))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, one alive at a time."""
        if self._quantised is not None:
            yield from self._quantised.iterate()
            return
        with self._stack:
            for file in self._files:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name)


def _quantised(folder: Path) -> Weights | None:
    """The folder, if config.json says that its weights are quantised."""
    path = folder / "config.json"
    if not path.is_file() or scheme_of(files.read_json(path)).kind == "plain":
        return None
    return open_weights(folder)


_SAFE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def from_manifest(path: Path) -> tuple[list[Header], Iterator[tuple[str, torch.Tensor]], int]:
    """Shared memory named by a manifest: headers, views into it, version."""
    if not path.is_file():
        raise WeightsRefused(f"no manifest {path}", "write the weights to shared memory first")
    manifest: dict[str, Any] = files.read_json(path)
    try:
        buffer, version, entries = Path(manifest["buffer"]), int(manifest["version"]), manifest["tensors"]
        headers = [(e["name"], tuple(e["shape"]), e["dtype"]) for e in entries]
        size = buffer.stat().st_size
        wild = [e["name"] for e in entries if not 0 <= e["offset"] <= e["offset"] + e["nbytes"] <= size]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise WeightsRefused(f"{path} is not a weight manifest: {error!r}", "write it again") from None
    if wild:
        raise WeightsRefused(f"{wild[0]} lies outside {buffer}", "write the weights again")

    def views() -> Iterator[tuple[str, torch.Tensor]]:
        data = torch.from_file(str(buffer), shared=True, size=size, dtype=torch.uint8)
        for entry in entries:
            part = data[entry["offset"] : entry["offset"] + entry["nbytes"]]
            yield entry["name"], part.view(DTYPES[entry["dtype"]]).view(entry["shape"])

    return headers, views(), version


def from_base64(parts: Any, load_format: str, *, allow_pickle: bool) -> dict[str, torch.Tensor]:
    """`serialized_named_tensors` of /update_weights_from_tensor.

    load_format "safetensors" is this engine's own: base64 of a safetensors file. SGLang's wire format is a pickle,
    which runs code when it is opened: it is refused unless the engine was started to allow it.
    """
    if not isinstance(parts, list) or not parts or not all(isinstance(p, str) for p in parts):
        raise WeightsRefused("serialized_named_tensors must be a list with one base64 string", "see load_format")
    try:
        raw = base64.b64decode(parts[0], validate=True)
    except binascii.Error as error:
        raise WeightsRefused(f"serialized_named_tensors is not base64: {error}", "send base64") from None
    if load_format == "safetensors":
        from safetensors.torch import load

        try:
            return load(raw)
        except Exception as error:  # the safetensors library raises its own type for a damaged header
            raise WeightsRefused(f"not a safetensors file: {error}", "send base64 of safetensors bytes") from None
    if not allow_pickle:
        raise WeightsRefused(
            f"load_format {load_format or 'default'!r} is a pickle, which this engine does not open",
            'use load_format "safetensors", disk or shared memory; or start the engine with allow_pickle=True',
        )
    if load_format == "flattened_bucket":
        from slimecli.engines.embedded.foreign import flattened_bucket

        return flattened_bucket(raw)
    if load_format:
        raise WeightsRefused(f"unknown load_format {load_format!r}", 'use "safetensors" or "flattened_bucket"')
    from multiprocessing.reduction import ForkingPickler

    pairs = ForkingPickler.loads(raw)
    return dict(pairs)

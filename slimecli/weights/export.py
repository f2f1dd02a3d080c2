"""Writing a model as an HF folder: cast, quantise, shard, then open it again and compare it with where it came from.

What an interruption leaves is `OUT.partial/`, and the same export goes on after its last whole shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from slimecli import __version__, console, files
from slimecli.errors import DataError, SlimeError, UsageError
from slimecli.model_specs import from_config
from slimecli.weights.check import check_folder
from slimecli.weights.conversion import stamps
from slimecli.weights.fingerprint import tensor_hash
from slimecli.weights.hf import read_header, save_hf_folder, shard_name, unfinished_shard
from slimecli.weights.maps import rules_of
from slimecli.weights.origin import Origin, Pairs
from slimecli.weights.partial import Partial, partial_folder
from slimecli.weights.quant import Weights, open_weights
from slimecli.weights.quant_fp8 import Fp8Quantizer, error_share, is_quantised, quantizer_of
from slimecli.weights.quant_scheme import DTYPE_KEYS, plain_config, with_dtype
from slimecli.weights.quantized import SCALE

CERTIFICATE = "certificate.json"
KIND = "export"
"""`kind` in the DONE.json of an exported folder"""
SHARD_BYTES = 5_000_000_000
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def export_weights(
    origin: Origin,
    out: Path,
    *,
    dtype: str = "",
    quantize: str = "",
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    card: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """Write, open again, compare, commit.

    Args:
        out: becomes an HF folder, whole or not at all.
        dtype: of what is not quantised; empty: the origin's.
        quantize: name in quant_fp8.QUANTIZERS; empty: no.
        max_shard_bytes: largest safetensors file (bytes), unless one tensor alone is larger.
        overwrite: an earlier export at `out` may be replaced.
        card: notes -> README.md.

    Returns what DONE.json holds.
    """
    from slimecli.weights.convert import torch_dtype

    kind, quantizer = torch_dtype(dtype or origin.dtype), quantizer_of(quantize)
    refuse_target(out, origin, overwrite=overwrite)
    notes: dict[str, Any] = {"kind": KIND, "from": origin.kind, **origin.facts}
    identity = {"dtype": str(kind), "quantize": quantize, "max shard size": max_shard_bytes, **_source(origin)}
    with partial_folder(out, identity, "slime export") as partial:
        folder, kept = partial.folder, _kept(origin)

        def cast(skip: Collection[str] = ()) -> Pairs:
            return ((n, t if n in kept else _cast(t, kind)) for n, t in origin.weights(skip))

        begun, there = _take_up(partial)
        done = _whole(there, origin, quantizer)
        checked = ((name, _checked(name, tensor)) for name, tensor in cast(done))
        stream = quantizer.stream(checked) if quantizer else checked
        notes |= save_hf_folder(
            ((name, tensor) for name, tensor in stream if name not in there),
            folder,
            like=origin.like,
            max_shard_bytes=max_shard_bytes,
            begun=begun,
            on_shard=lambda number: partial.note(number, unfinished_shard(number)),
        )
        _complete_config(folder, kind)
        if quantizer:
            quantizer.finish(folder)
        notes |= {"dtype": _dtype_named(folder), "quantized": quantize}
        files.write_text(folder / "README.md", card(notes))
        check_folder(folder)
        rows = compare(cast(), open_weights(folder), quantizer)
        # no folder names: the certificate may be published
        told = {k: v for k, v in notes.items() if k not in origin.facts}
        head = {"to": "hf", "verified": True, "slime": __version__, "torch": torch.__version__}
        files.write_json(folder / CERTIFICATE, {**told, **head, "weights": rows})
        partial.commit(notes)
    return notes


def _source(origin: Origin) -> dict[str, Any]:
    """What an unfinished export must agree with, besides its options, to be gone on with."""
    parts = [origin.path, *sorted(p for p in origin.path.iterdir() if p.is_dir()), origin.like]
    return {"source": {str(p.resolve()): stamps(p) for p in parts}, "slime version": __version__}


def _take_up(partial: Partial) -> tuple[int, set[str]]:
    """(shards that an earlier process has written, the tensors they hold)."""
    names = [unfinished_shard(n) for n in range(1, len(partial.done) + 1)]
    for number, name in enumerate(names, 1):  # they may have got their last names already
        last = partial.folder / shard_name(number, len(names))
        if last.is_file():
            last.rename(partial.folder / name)
    partial.keep_only(names)
    if names:
        console.note(f"continuing: {len(names)} shard(s) were written before")
    return len(names), {tensor for name in names for tensor in read_header(partial.folder / name)}


def _whole(there: set[str], origin: Origin, quantizer: Fp8Quantizer | None) -> set[str]:
    """Tensors of the origin that need not be read again: what each of them became is there."""
    done = there & origin.shapes.keys()
    if quantizer is None:
        return done
    done = {n for n in done if n + SCALE in there or not is_quantised(n, origin.shapes[n])}
    for name in done:
        quantizer.takes(name, origin.shapes[name])
    return done


def compare(source: Pairs, result: Weights, quantizer: Fp8Quantizer | None) -> dict[str, dict[str, Any]]:
    """Every tensor of the source against what reads back: equal to the bit, or off by no more than e4m3 rounding.

    Returns name -> {"dtype", "shape", "hash" (of the source's bytes, as cast), "error" (share of what is allowed)}.
    """
    rows: dict[str, dict[str, Any]] = {}
    quantised = set(quantizer.quantised) if quantizer else set()
    for name, tensor in source:
        if name not in result.entries:
            raise DataError(f"verification: {name} is not in the result", "report this")
        back = result.read(name)
        rows[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "hash": _hash(tensor),
        }
        if tuple(back.shape) != tuple(tensor.shape):
            raise DataError(
                f"verification: {name} has shape {list(back.shape)}, not {list(tensor.shape)}", "report this"
            )
        if name in quantised:
            assert quantizer is not None
            share = error_share(tensor, back, power_of_two=quantizer.power_of_two)
            rows[name] |= {"dtype": "float8_e4m3fn", "error": round(share, 4)}
            if not share <= 1:
                raise DataError(
                    f"verification: {name} is off by {share:.3g} times what fp8 rounding allows", "report this"
                )
        elif back.dtype != tensor.dtype or not torch.equal(_lanes(back), _lanes(tensor)):
            raise DataError(
                f"verification: {name} reads back differently from what was written",
                "the disk or its driver is at fault, or this is a bug: export again",
            )
    if stray := sorted(set(result.entries) - set(rows)):
        raise DataError(f"verification: the result has {stray[0]}, the source has not", "report this")
    return rows


def refuse_target(out: Path, origin: Origin, *, overwrite: bool) -> None:
    """An export may replace an earlier export, and nothing else; least of all what it is made from."""
    target = out.resolve()
    for used in (origin.path.resolve(), origin.like.resolve()):
        if target == used or target in used.parents or used in target.parents:
            raise UsageError(f"--out {out} lies in, or contains, what is exported ({used})", "choose another folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not is_export(out):
        raise UsageError(f"{out} exists and is no export of slime", "choose another --out; it is not replaced")
    if not overwrite:
        raise UsageError(f"{out} exists already", "choose another --out, or remove it")


def is_export(folder: Path) -> bool:
    """True for a complete folder that slime exported."""
    return files.is_committed(folder) and files.read_json(folder / files.DONE).get("kind") == KIND


def parse_bytes(text: str) -> int:
    """`5GB`, `512MiB` or a plain number, in bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    unit = match.group(2) if match else "?"
    unit = unit if unit in _UNITS else f"{unit}B"
    if not match or unit not in _UNITS or float(match.group(1)) * _UNITS[unit] < 1:
        raise UsageError(f"{text!r} is no size", "write 5GB, 500MB or 2GiB")
    return int(float(match.group(1)) * _UNITS[unit])


def _kept(origin: Origin) -> set[str]:
    """Tensors that no cast may touch, such as what routers add to their scores; none for an unknown family."""
    try:
        spec = from_config(plain_config(files.read_json(origin.like / "config.json")), name=origin.path.name)
    except SlimeError:
        return set()
    return {name for rule in rules_of(spec, 0, origin.shapes) if rule.keep_dtype for name in rule.hf}


def _cast(tensor: torch.Tensor, kind: torch.dtype | None) -> torch.Tensor:
    return tensor.to(kind) if kind is not None and tensor.is_floating_point() else tensor


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
        bad = int((~torch.isfinite(tensor)).sum())  # a sum may overflow where no value is wrong
        if bad:
            raise DataError(f"{name} holds {bad} NaN or infinite value(s)", "these weights are broken: take other ones")
    return tensor


def _complete_config(folder: Path, kind: torch.dtype | None) -> None:
    """The copied config.json may speak of another dtype, or of a quantisation that the result does not have."""
    config = plain_config(files.read_json(folder / "config.json"))
    if kind is not None:
        config = with_dtype(config, str(kind).removeprefix("torch."))
    files.write_json(folder / "config.json", config)


def _dtype_named(folder: Path) -> str:
    """The dtype that config.json states."""
    config = files.read_json(folder / "config.json")
    nested = config.get("text_config") or {}
    return str(next((c[k] for c in (config, nested) for k in DTYPE_KEYS if c.get(k)), "as stored"))


def _lanes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, so that zeros of either sign differ."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(whole[tensor.element_size()])


def _hash(tensor: torch.Tensor) -> str:
    return f"{int(tensor_hash(tensor).item()) & (2**64 - 1):016x}"

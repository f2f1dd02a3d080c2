"""What quantization_config in config.json says about how weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slimecli.errors import DataError

CONFIG_KEY = "quantization_config"
DTYPE_KEYS = ("dtype", "torch_dtype")
"""newer and older transformers"""
READABLE = "slime reads fp8 e4m3 (blocks, per channel, per tensor) and compressed-tensors int4 (pack-quantized)"


@dataclass(frozen=True)
class Scheme:
    """How a folder's weights are stored."""

    kind: Literal["plain", "fp8", "int4"]
    block: tuple[int, int] | None = None
    """rows and columns that share a scale; None: the scale's shape tells (per tensor or per row)"""


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme that a config.json states; one that cannot be read is a DataError."""
    stated = quantization_of(config)
    if not stated:
        return Scheme("plain")
    method = str(stated.get("quant_method", "")).lower()
    if method == "fp8":
        fmt = str(stated.get("fmt") or "e4m3").lower()
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise _unreadable(f"fp8 with fmt {fmt!r}")
        return Scheme("fp8", _block(stated.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(stated)
    raise _unreadable(f"quant_method {method!r}")


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """quantization_config of a model, or of its language model; empty: not quantised."""
    nested = config.get("text_config")
    found = config.get(CONFIG_KEY) or (nested.get(CONFIG_KEY) if isinstance(nested, Mapping) else None)
    if found and not isinstance(found, Mapping):
        raise _unreadable(repr(found))
    return dict(found or {})


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with its weights dequantised."""
    out = {k: v for k, v in config.items() if k != CONFIG_KEY}
    if isinstance(config.get("text_config"), Mapping):
        out["text_config"] = {k: v for k, v in config["text_config"].items() if k != CONFIG_KEY}
    return out


def _block(size: Any) -> tuple[int, int] | None:
    if not size:
        return None
    if len(size) != 2 or any(not isinstance(n, int) or n < 1 for n in size):
        raise _unreadable(f"weight_block_size {size!r}")
    return size[0], size[1]


def _compressed(stated: Mapping[str, Any]) -> Scheme:
    """compressed-tensors: all groups of layers must share one scheme."""
    groups = [g for g in stated.get("config_groups", {}).values() if g.get("weights")]
    schemes = {_compressed_group(g["weights"], g.get("format") or stated.get("format")) for g in groups}
    if len(schemes) != 1:
        raise _unreadable(f"compressed-tensors with {len(schemes)} ways of storing weights")
    return schemes.pop()


def _compressed_group(weights: Mapping[str, Any], fmt: Any) -> Scheme:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    told = f"compressed-tensors {fmt}: {bits}-bit {kind} per {strategy}"
    if fmt == "float-quantized" and (bits, kind) == (8, "float") and strategy in ("tensor", "channel", "block"):
        return Scheme("fp8", _block(weights.get("block_structure")) if strategy == "block" else None)
    is_int4 = fmt == "pack-quantized" and (bits, kind, strategy) == (4, "int", "group")
    if not is_int4 or not weights.get("symmetric", True) or weights.get("actorder"):
        raise _unreadable(told + ("" if weights.get("symmetric", True) else ", asymmetric"))
    return Scheme("int4", (1, int(weights["group_size"])))


def _unreadable(what: str) -> DataError:
    return DataError(
        f"config.json: weights are stored as {what}", f"{READABLE}; get the bfloat16 model, or one of these"
    )


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json that states this dtype under one name, and in its language model's part if that states one."""
    out = {k: v for k, v in config.items() if k not in DTYPE_KEYS} | {"torch_dtype": dtype}
    text = config.get("text_config")
    if isinstance(text, Mapping) and any(k in text for k in DTYPE_KEYS):
        out["text_config"] = {k: v for k, v in text.items() if k not in DTYPE_KEYS} | {"torch_dtype": dtype}
    return out

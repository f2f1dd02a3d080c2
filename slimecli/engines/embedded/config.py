"""What the engine must know of a model folder before it loads weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.errors import SlimeError
from slimecli.weights.quant_scheme import plain_config

FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "mimo")
"""model_type values that share the dense decoder layout of model.py"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a dense decoder."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    """True: the output matrix is the embedding matrix"""
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: dict[str, Any]
    """rope_type, rope_theta and the numbers of the type"""
    max_positions: int

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> DecoderConfig:
        """From config.json; call `why_not` first."""
        family, heads = config["model_type"], config["num_attention_heads"]
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            eps=config.get("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            qkv_bias=family in ("qwen2", "mimo") or attention_bias,
            o_bias=family in ("llama", "qwen3") and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            rope=rope_parameters(config),
            max_positions=config.get("max_position_embeddings", 2048),
        )


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """One dict from either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def why_not(config: dict[str, Any]) -> str:
    """Why the dense decoder of model.py cannot run this model; empty when it can."""
    if config.get("model_type") not in FAMILIES:
        return f"model_type {config.get('model_type')!r} has its own layout"
    if config.get("hidden_act", "silu") != "silu":
        return f"activation {config['hidden_act']!r}"
    kind = rope_parameters(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        return f"rope type {kind!r}"
    if uses_sliding_window(config):
        return "sliding-window attention"
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial rotary embedding"
    return ""


def uses_sliding_window(config: dict[str, Any]) -> bool:
    """True when some layer attends to a window only."""
    if "sliding_attention" in (config.get("layer_types") or []):
        return True
    family = config.get("model_type", "")
    if family.startswith(("qwen", "mimo")):
        return bool(config.get("use_sliding_window")) and bool(config.get("sliding_window"))
    return bool(config.get("sliding_window")) and not config.get("layer_types")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; of quantised weights that of the model they are dequantised to."""
    path = folder / "config.json"
    if not path.is_file():
        raise SlimeError(f"{folder} has no config.json", "name a Hugging Face model folder")
    return plain_config(files.read_json(path))


def end_tokens(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: of config.json, generation_config.json and the tokenizer."""
    found: set[int] = set()
    path = folder / "generation_config.json"
    generation = files.read_json(path) if path.is_file() else {}
    for value in (config.get("eos_token_id"), generation.get("eos_token_id"), getattr(tokenizer, "eos_token_id", None)):
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return frozenset(found)


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32 rotation speeds, scaled as the config says."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    speeds: torch.Tensor = 1.0 / (rope["rope_theta"] ** exponent)
    if rope["rope_type"] == "linear":
        return speeds / float(rope["factor"])
    if rope["rope_type"] == "llama3":
        factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        original = float(rope["original_max_position_embeddings"])
        wavelength = 2 * math.pi / speeds
        blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        # below `low` turns in the original context: fully scaled; above `high`: untouched; linear in between
        return (1 - blend) * speeds / factor + blend * speeds
    return speeds


def pick_dtype(name: str, config: dict[str, Any], device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU (bf16 matmuls are 2-5x slower there) and the checkpoint's dtype on a GPU."""
    if name == "auto":
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        return torch.float32 if device.type == "cpu" else DTYPES.get(stored, torch.bfloat16)
    if name not in DTYPES:
        raise SlimeError(f"unknown engine dtype {name!r}", f"use auto, {', '.join(DTYPES)}")
    return DTYPES[name]

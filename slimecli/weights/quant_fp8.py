"""Writing fp8: the weights of linear layers in e4m3 with a float32 scale per 128x128 block, all else as it is.

This is the form of DeepSeek's and Qwen's published FP8 models, which SGLang and transformers load (and quant.py reads).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.errors import DataError, UsageError, nearest
from slimecli.weights.quant_codec import E4M3_MAX, LOGICAL, SMALLEST_SCALE, block_maxima, encode_e4m3
from slimecli.weights.quant_scheme import CONFIG_KEY, plain_config, with_dtype

BLOCK = (128, 128)
QUANTIZERS = {"fp8": False, "fp8-ue8m0": True}
"""name -> whether scales are powers of two"""
_LINEAR = (
    "[qkvo]_proj|qkv_proj|gate_proj|up_proj|down_proj|gate_up_proj|w[123]"
    "|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|wq_b|wk"
    "|in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj"
)
"""modules whose weight is quantised. What is not named stays: embeddings, norms, routers, lm_head, eh_proj, the shared
expert's gate, in_proj_a/b/ba, conv1d: small, or too sensitive, and engines keep them in bfloat16 too"""
_QUANTISED = re.compile(rf"\.(?:{_LINEAR})\.weight$|\.experts\.(?:gate_up_proj|down_proj)$")
_VISION = re.compile(r"(^|\.)(visual|vision_tower|vision_model)\.")


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight of this HF name is stored in fp8."""
    return len(shape) >= 2 and bool(_QUANTISED.search(name)) and not _VISION.search(name)


class Fp8Quantizer:
    """Quantises a stream of weights and remembers what stayed as it was.

    Args:
        power_of_two: scales are powers of two (UE8M0).
    """

    def __init__(self, *, power_of_two: bool = False) -> None:
        self.power_of_two = power_of_two
        self.quantised: list[str] = []
        self._kept: list[str] = []

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether this weight is quantised; remembers the answer for config.json."""
        if is_quantised(name, shape):
            self.quantised.append(name)
            return True
        if name.endswith(".weight") and len(shape) >= 2:
            self._kept.append(name.removesuffix(".weight"))
        return False

    def stream(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) -> the same, where a quantised weight is followed by its `NAME_scale_inv`."""
        for name, tensor in pairs:
            if not self.takes(name, tuple(tensor.shape)):
                yield name, tensor
                continue
            values, scales = encode_e4m3(tensor, BLOCK, power_of_two=self.power_of_two)
            if not torch.isfinite(scales).all():
                raise DataError(f"{name} holds NaN or infinite values", "these weights are broken: get them again")
            yield name, values
            yield f"{name}_scale_inv", scales

    def quantization_config(self) -> dict[str, Any]:
        """What config.json says of the weights, once the stream is at its end."""
        stated = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            # a tied output layer has no tensor of its own
            "modules_to_not_convert": sorted({*self._kept, "lm_head"}),
        }
        return {**stated, "scale_fmt": "ue8m0"} if self.power_of_two else stated

    def finish(self, folder: Path) -> None:
        """Complete config.json of the folder that the stream was written to."""
        if not self.quantised:
            raise DataError(
                f"none of the tensors is the weight of a linear layer that slime quantises ({_sample(self._kept)})",
                "leave out --quantize: this model's layers have names that slime does not know",
            )
        plain = plain_config(files.read_json(folder / "config.json"))
        config = with_dtype(plain, str(LOGICAL).removeprefix("torch."))
        files.write_json(folder / "config.json", {**config, CONFIG_KEY: self.quantization_config()})


def quantizer_of(name: str) -> Fp8Quantizer | None:
    """By the name given on the command line; None for an empty one."""
    if not name:
        return None
    if name not in QUANTIZERS:
        raise UsageError(f"--quantize {name!r}{nearest(name, list(QUANTIZERS))}", f"say {' or '.join(QUANTIZERS)}")
    return Fp8Quantizer(power_of_two=QUANTIZERS[name])


def error_share(weight: torch.Tensor, restored: torch.Tensor, *, power_of_two: bool = False) -> float:
    """Largest deviation of a restored weight as a share of what e4m3 rounding may cause; above 1 something is wrong.

    Rounding moves a number by 2^-4 of itself at most, or by half the step between subnormals, 2^-10 scales; restoring
    to bfloat16 adds 2^-9 of the result. The scale is worked out anew from `weight`.
    """
    rows, cols = weight.shape[-2:]
    worst = torch.zeros(())
    for source, result in zip(weight.reshape(-1, rows, cols), restored.reshape(-1, rows, cols), strict=True):
        for start in range(0, rows, BLOCK[0]):
            band = source[start : start + BLOCK[0]].float()
            scale = (block_maxima(band, BLOCK[1]) / E4M3_MAX).clamp_(min=SMALLEST_SCALE) * (2 if power_of_two else 1)
            allowed = band.abs() * (2**-4 + 2**-8) + scale.repeat_interleave(BLOCK[1])[:cols] * 2**-10
            deviation = (result[start : start + BLOCK[0]].float() - band).abs_() / allowed
            worst = torch.maximum(worst, deviation.amax())
    return float(worst)


def _sample(names: list[str]) -> str:
    return ", ".join(names[:3]) or "there is none"

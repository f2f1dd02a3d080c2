"""mbridge in place of slime's weight maps (`trainer.bridge = "mbridge"`): the same two calls as weights.py.

It is given slime's chunks: of mbridge only the names and shapes of weights are used, not how it would build a model.
What it takes for granted, and slime does not, is said by `_over`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slimecli.errors import DataError, SlimeError
from slimecli.model_specs import ModelSpec
from slimecli.trainers.megatron.critic import ValueHead
from slimecli.weights.hf import HfFolder

ROWS_PER_TOKEN = ("embedding.word_embeddings.weight", "output_layer.weight")


def load_hf(chunks: list[Any], folder: HfFolder, spec: ModelSpec) -> None:
    """Fill this rank's parameters from an HF folder. Collective: the first rank of a tensor-parallel group reads."""
    bridge = _bridge(chunks, folder, spec)
    try:
        with torch.no_grad():
            bridge.load_weights(chunks, str(folder.path), memory_efficient=True)
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        raise DataError(f"mbridge cannot load {folder.path}: {error}", "set trainer.bridge to slime") from error


def hf_tensors(
    chunks: list[Any], spec: ModelSpec, dtype: torch.dtype, folder: HfFolder
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor in `dtype`) in the order of Megatron's parameters; a tied tensor once. Collective."""
    bridge = _bridge(chunks, folder, spec)
    seen: set[str] = set()
    with torch.no_grad():
        for name, tensor in bridge.export_weights(chunks):
            if name not in seen:
                seen.add(name)
                yield name, tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)


def _bridge(chunks: list[Any], folder: HfFolder, spec: ModelSpec) -> Any:
    """mbridge's bridge of this family, over slime's chunks."""
    if importlib.util.find_spec("mbridge") is None:
        raise SlimeError("mbridge is not installed", "pip install mbridge, or set trainer.bridge to slime")
    import mbridge
    from mbridge.core.bridge import _MODEL_REGISTRY
    from transformers import PretrainedConfig

    kind = _MODEL_REGISTRY.get(spec.family.model_type)
    if kind is None or not issubclass(kind, mbridge.core.LLMBridge):
        known = ", ".join(sorted(_MODEL_REGISTRY))
        raise SlimeError(
            f'trainer.bridge = "mbridge" has no map for {spec.family.model_type} models, only for {known}',
            "set trainer.bridge to slime",
        )
    config = PretrainedConfig()
    for name, value in folder.config().items():
        setattr(config, name, value)
    return _over(kind, chunks, spec)(config, dtype=chunks[0].config.params_dtype)


def _over(kind: Any, chunks: list[Any], spec: ModelSpec) -> Any:
    """The bridge class, for chunks that slime has built."""
    from mbridge.core.safetensor_io import SafeTensorIO

    rows = chunks[0].vocab_size

    class Bridge(kind):
        # its own mapping is one dict for all models, and knows tied embeddings of few families
        _DIRECT_MAPPING = {
            **kind._DIRECT_MAPPING,
            "output_layer.weight": "model.embed_tokens.weight" if spec.tied else "lm_head.weight",
        }

        def _build_config(self) -> Any:
            # built anew it would be another model: mbridge reads what transformers 5 has moved
            return chunks[0].config

        def _adjust_mapping_for_shared_weights(self) -> None:
            """Done above."""

        def _get_safetensor_io(self, weights_path: str) -> Any:
            # DeepSeek's reader dequantises with a GPU kernel whether weights are quantised or not
            return SafeTensorIO(weights_path)

        def _weight_name_mapping_mcore_local_to_global(self, model: Any, consider_ep: bool = True) -> dict[str, str]:
            found: dict[str, str] = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep)
            if isinstance(getattr(model, "output_layer", None), ValueHead):
                del found["output_layer.weight"]
            return found

        def _weight_to_mcore_format(self, name: str, tensors: list[Tensor]) -> Tensor:
            tensor: Tensor = super()._weight_to_mcore_format(name, tensors)
            if name not in ROWS_PER_TOKEN:
                return tensor
            return torch.nn.functional.pad(tensor, (0, 0, 0, rows - len(tensor)))

        def _weight_to_hf_format(self, name: str, tensor: Tensor) -> tuple[list[str], list[Tensor]]:
            names, tensors = super()._weight_to_hf_format(name, tensor)
            return names, [t[: spec.vocab] for t in tensors] if name in ROWS_PER_TOKEN else tensors

    return Bridge

"""HF <-> Megatron weight maps: one file per layout, chosen by the family's `layout`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from slimecli.errors import DataError
from slimecli.model_specs import ModelSpec
from slimecli.weights.maps.rule import Rule

Shape = tuple[int, ...]

LAYOUTS: dict[str, str] = {
    "dense": "slimecli.weights.maps.dense",
}
"""Family.layout -> the module with its `rules` and `objects`"""


def _layout(spec: ModelSpec) -> Any:
    if spec.family.layout not in LAYOUTS:
        raise DataError(f"no weight map for layout {spec.family.layout!r}", f"known: {', '.join(LAYOUTS)}")
    return import_module(LAYOUTS[spec.family.layout])


def rules_of(spec: ModelSpec, padded_vocab: int = 0, stored: Mapping[str, Shape] | None = None) -> list[Rule]:
    """The whole map of a model: every HF tensor appears in exactly one rule.

    Args:
        padded_vocab: rows of Megatron's embedding; 0: as many as the model has.
        stored: names and shapes of the tensors that a folder has, HF or Megatron ones. They tell what a spec does not:
            whether the prediction layers (MTP) are there at all, whether experts are stacked, which tensors of other
            parts (vision) go through unchanged. None: as the hub has the model, language model only.
    """
    found: list[Rule] = _layout(spec).rules(spec, padded_vocab)
    return found


def objects_of(spec: ModelSpec) -> list[str]:
    """Keys of the objects without content that Megatron wants to find beside the tensors (`..._extra_state/shard_0_1`);
    their value is `[None]`."""
    found: list[str] = _layout(spec).objects(spec)
    return found


def hf_shapes(spec: ModelSpec, stored: Mapping[str, Shape] | None = None) -> dict[str, Shape]:
    """HF name -> shape of every weight, in layer order; `stored` as for rules_of."""
    return {name: shape for rule in rules_of(spec, 0, stored) for name, shape in rule.hf.items()}

"""HF <-> Megatron weight maps: one file per layout, chosen by the family's `layout`."""

from __future__ import annotations

from importlib import import_module

from slimecli.errors import DataError
from slimecli.model_specs import ModelSpec
from slimecli.weights.maps.rule import Layout, Rule

LAYOUTS: dict[str, str] = {
    "dense": "slimecli.weights.maps.dense:LAYOUT",
}
"""Family.layout -> its Layout"""


def layout_of(spec: ModelSpec) -> Layout:
    """The layout of a model's family."""
    if spec.family.layout not in LAYOUTS:
        raise DataError(f"no weight map for layout {spec.family.layout!r}", f"known: {', '.join(LAYOUTS)}")
    module, _, name = LAYOUTS[spec.family.layout].partition(":")
    layout: Layout = getattr(import_module(module), name)
    return layout


def rules_of(spec: ModelSpec, padded_vocab: int = 0) -> list[Rule]:
    """The whole map of a model: every HF tensor appears in exactly one rule.

    Args:
        padded_vocab: rows of Megatron's embedding; 0: as many as the model has.
    """
    return layout_of(spec).rules(spec, padded_vocab)


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every weight, in layer order."""
    return {name: shape for rule in rules_of(spec) for name, shape in rule.hf.items()}

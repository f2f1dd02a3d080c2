"""A whole model: embedding, decoder layers, output layer, prediction layers.

Megatron keys carry the layer number (`decoder.layers.3....`): with `non_homogeneous_layers` in the checkpoint's content
metadata every Megatron loads that form, whatever layer pattern it was built with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from slimecli.errors import DataError
from slimecli.model_specs import ModelSpec
from slimecli.weights.maps.attention import attention
from slimecli.weights.maps.layouts import MtpNames, Names, Place
from slimecli.weights.maps.mlp import mlp
from slimecli.weights.maps.rule import Rule, Shape, padded_rows, swapped_columns, whole


def model_rules(
    spec: ModelSpec, names: Names, padded_vocab: int = 0, stored: Mapping[str, Shape] | None = None
) -> list[Rule]:
    """All rules in layer order; arguments as for rules_of."""
    rows, table = padded_vocab or spec.vocab, (spec.vocab, spec.hidden)
    out = [padded_rows(f"{names.root}embed_tokens.weight", "embedding.word_embeddings.weight", table, rows)]
    for i in range(spec.layers):
        out += _layer(Place(spec, names, f"{names.root}layers.{i}.", f"decoder.layers.{i}.", i, stored))
    out.append(whole(f"{names.root}norm.weight", "decoder.final_layernorm.weight", (spec.hidden,)))
    if not spec.tied:
        out.append(padded_rows("lm_head.weight", "output_layer.weight", table, rows))
    if spec.mtp:
        for k, mtp in enumerate(_prediction_names(spec, names)):
            out += _prediction(spec, names, mtp, k, stored)
    return out


def _layer(at: Place) -> list[Rule]:
    out = attention(at)
    if at.spec.sandwich:
        norms = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
        out += [whole(at.hf + norm, at.core + norm, (at.spec.hidden,)) for norm in norms]
    return out + mlp(at)


def _prediction(
    spec: ModelSpec, names: Names, mtp: MtpNames, k: int, stored: Mapping[str, Shape] | None
) -> Iterator[Rule]:
    core, hidden = f"mtp.layers.{k}.", (spec.hidden,)
    yield whole(f"{mtp.head}{mtp.embedding_norm}.weight", f"{core}enorm.weight", hidden)
    yield whole(f"{mtp.head}{mtp.hidden_norm}.weight", f"{core}hnorm.weight", hidden)
    into = swapped_columns if mtp.swapped else whole
    yield into(f"{mtp.head}{mtp.projection}.weight", f"{core}eh_proj.weight", (spec.hidden, 2 * spec.hidden))
    yield from _layer(Place(spec, names, mtp.layer, f"{core}transformer_layer.", spec.layers + k, stored))
    yield whole(f"{mtp.head}{mtp.norm}.weight", f"{core}final_layernorm.weight", hidden)


def _prediction_names(spec: ModelSpec, names: Names) -> list[MtpNames]:
    """The names of each prediction layer, numbers filled in."""
    if names.mtp is None or (spec.mtp > 1 and names.mtp.head.format(k=0, n=0) == names.mtp.head.format(k=1, n=1)):
        raise DataError(
            f"{spec.name} states {spec.mtp} prediction layer(s), which {spec.family.model_type} is not known to have",
            "use the config.json that came with the weights",
        )
    return [
        replace(
            names.mtp,
            layer=names.mtp.layer.format(k=k, n=spec.layers + k),
            head=names.mtp.head.format(k=k, n=spec.layers + k),
        )
        for k in range(spec.mtp)
    ]

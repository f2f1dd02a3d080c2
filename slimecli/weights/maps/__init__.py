"""HF <-> Megatron weight maps: names per layout (layouts.py), structure from the spec (decoder.py and its parts)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from slimecli.errors import DataError
from slimecli.model_specs import ModelSpec
from slimecli.weights.maps.decoder import model_rules
from slimecli.weights.maps.layouts import LAYOUTS, Names
from slimecli.weights.maps.rule import Rule, Shape, whole


def rules_of(spec: ModelSpec, padded_vocab: int = 0, stored: Mapping[str, Shape] | None = None) -> list[Rule]:
    """The whole map of a model: every HF tensor appears in exactly one rule.

    Args:
        padded_vocab: rows of Megatron's embedding; 0: as many as the model has.
        stored: names and shapes of the tensors that a folder has, HF or Megatron ones. They tell what a spec does not:
            whether the prediction layers (MTP) are there at all, whether experts are stacked, which tensors of other
            parts (vision) go through unchanged. None: as the hub has the model, language model only.
    """
    names = _names(spec, stored or {})
    if stored is None:
        return model_rules(spec, names, padded_vocab)
    rules = model_rules(fit(spec, stored), names, padded_vocab, stored)
    return rules + [whole(name, name, stored[name]) for name in _carried(spec, names, stored)]


def fit(spec: ModelSpec, stored: Collection[str]) -> ModelSpec:
    """The spec without prediction layers if none of their tensors is stored; names are HF or Megatron ones.

    Configs go on stating the layers where the weights were saved without them, as transformers does.
    """
    mtp = _names(spec, stored).mtp
    if not spec.mtp or mtp is None:
        return spec
    if "embedding.word_embeddings.weight" in stored:
        found = "mtp.layers.0.enorm.weight" in stored
    else:
        here = tuple(p.format(k=k, n=spec.layers + k) for k in range(spec.mtp) for p in (mtp.layer, mtp.head))
        found = any(name.startswith(here) for name in stored)
    return spec if found else dataclasses.replace(spec, mtp=0)


def stored_in(tensors: Mapping[str, Shape], hf_names: Iterable[str]) -> dict[str, Shape]:
    """`stored` of rules_of for a Megatron checkpoint.

    Args:
        tensors: what the checkpoint has.
        hf_names: tensors of the HF folder it was made from, where known: they tell in which of several forms it was.
    """
    telling = (name for name in hf_names if ".experts." in name or name.endswith("model.embed_tokens.weight"))
    return {**dict.fromkeys(telling, ()), **tensors}


def objects_of(rules: Iterable[Rule]) -> list[str]:
    """Keys of the objects that Megatron wants to find beside the tensors (`..._extra_state/shard_0_1`), each `[None]`.

    Linear layers demand theirs, experts one each; norms and attention have one with Transformer Engine. One that a
    model does not have is ignored, so every module gets one.
    """
    modules: dict[str, int] = {}
    for rule in rules:
        module, _, _ = rule.key.rpartition(".")
        if rule.key in rule.hf or module in _STATELESS:
            continue
        modules[module] = rule.full[0] if ".experts.experts." in rule.key else 1
        block, found, _ = module.partition(".self_attention.")
        if found:
            modules[f"{block}.self_attention.core_attention"] = 1
    return [f"{module}._extra_state/shard_{i}_{n}" for module, n in modules.items() for i in range(n)]


_STATELESS = ("embedding.word_embeddings", "output_layer")


def hf_shapes(spec: ModelSpec, stored: Mapping[str, Shape] | None = None) -> dict[str, Shape]:
    """HF name -> shape of every weight, in layer order; `stored` as for rules_of."""
    return {name: shape for rule in rules_of(spec, 0, stored) for name, shape in rule.hf.items()}


def embedding_of(spec: ModelSpec, stored: Collection[str]) -> str:
    """HF name of the embedding; `stored` as for rules_of."""
    return f"{_names(spec, stored).root}embed_tokens.weight"


def copies_of(spec: ModelSpec, stored: Collection[str]) -> dict[str, tuple[str, ...]]:
    """HF name of the embedding or output layer -> the names under which prediction layers have it again in a folder."""
    names, out = _names(spec, stored), dict[str, tuple[str, ...]]()
    table = f"{names.root}embed_tokens.weight"
    for k in range(spec.mtp if names.mtp else 0):
        assert names.mtp is not None
        head = names.mtp.head.format(k=k, n=spec.layers + k)
        for copy in names.mtp.copies:
            main = table if spec.tied or copy.startswith("embed") else "lm_head.weight"
            if head + copy in stored:
                out[main] = (*out.get(main, ()), head + copy)
    return out


def _names(spec: ModelSpec, stored: Collection[str]) -> Names:
    if spec.family.layout not in LAYOUTS:
        raise DataError(f"no weight map for layout {spec.family.layout!r}", f"known: {', '.join(LAYOUTS)}")
    names = LAYOUTS[spec.family.layout]
    if f"{names.root}layers.0.mlp.experts.gate_up_proj" in stored:  # by transformers, without its hub names
        names = dataclasses.replace(names, mlp="mlp.")
    other = names.other_root
    return dataclasses.replace(names, root=other) if other and f"{other}embed_tokens.weight" in stored else names


def _carried(spec: ModelSpec, names: Names, stored: Mapping[str, Shape]) -> list[str]:
    """Stored tensors outside the language model, and the copies of embedding and output layer in prediction layers."""
    copies = {copy for found in copies_of(spec, stored).values() for copy in found}
    return [n for n in stored if n in copies or (names.carried and n.startswith(names.carried))]

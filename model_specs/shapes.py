"""The parts of config.json that are more than one number: heads, rope, and what varies from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slimecli.model_specs.spec import GatedDelta, Indexer, ModelSpec, RopeScaling

if TYPE_CHECKING:
    from slimecli.model_specs.config import Reading

DENSE_KEYS = ("mlp_layer_types", "first_k_dense_replace", "mlp_only_layers")
"""config fields that say which layers have a dense MLP, in the order in which they win"""

_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ROPE_OTHER = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
"""read elsewhere, or without meaning for text (multi-axis positions are equal on text)"""


def read_heads(found: Reading, text: Mapping[str, Any]) -> None:
    """kv_heads and head_dim, which follow from other numbers where they are not stated."""
    heads, hidden = found.values.get("heads"), found.values.get("hidden")
    if heads is None or hidden is None:
        return
    found.values["kv_heads"] = int(text.get("num_key_value_heads") or heads)
    rope_dim = found.values.get("mla.rope_dim")
    found.values["head_dim"] = rope_dim or int(text.get("head_dim") or hidden // max(heads, 1))


def write_heads(spec: ModelSpec) -> dict[str, Any]:
    """The fields that read_heads reads."""
    stated = {"num_key_value_heads": spec.kv_heads}
    return stated if spec.mla else {**stated, "head_dim": spec.head_dim}


def read_rope(found: Reading, text: Mapping[str, Any]) -> None:
    """Rotary base, scaling and rotated part, from either of the two forms that transformers has written."""
    parameters: dict[str, Any] = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    found.values["rope_theta"] = float(
        parameters.get("rope_theta") or text.get("rope_theta") or found.family.traits.get("rope_theta", 10000.0)
    )
    found.values["rope_scaling"] = _scaling(found, parameters)
    part = parameters.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    key = found.family.keys.get("rotary", "")
    width = text.get("rotary_dim")
    if key == "rotary_dim" and width is not None and found.values.get("head_dim"):
        found.values["rotary"] = int(width) / found.values["head_dim"]
    elif key and part is not None:
        found.values["rotary"] = float(part)
    elif key == "rotary_dim":  # not stated: the whole head
        found.values["rotary"] = 1.0
    elif key:
        found.missing.append(key)
    elif part is not None and part != 1.0:
        found.strange.append(f"partial_rotary_factor is {part!r}, expected 1.0")


def _scaling(found: Reading, parameters: Mapping[str, Any]) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    own = {"llama3": _LLAMA3, "yarn": _YARN}.get(kind)
    if own is None:
        found.strange.append(f"rope scaling is {kind!r}, expected llama3 or yarn")
        return None
    known = {"factor", "original_max_position_embeddings", *own}
    stated = {k: v for k, v in parameters.items() if v is not None and k not in _ROPE_OTHER}
    for key in stated.keys() - known:
        found.strange.append(f"rope scaling has {key} = {stated[key]!r}, which {kind} does not")
    lacking = {"factor", *(("original_max_position_embeddings",) if kind == "yarn" else ())} - stated.keys()
    found.missing += [f"rope_scaling.{key}" for key in sorted(lacking)]
    if lacking:
        return None
    positions = int(stated.pop("original_max_position_embeddings", 8192))
    numbers = {k: float(v) for k, v in stated.items() if k in known}
    return RopeScaling(rope_type=kind, original_max_positions=positions, **numbers)


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """Rope in the form that the family is published with."""
    scaling, part = spec.rope_scaling, spec.family.keys.get("rotary", "")
    stated: dict[str, Any] = {}
    if scaling is not None:
        names = _LLAMA3 if scaling.rope_type == "llama3" else _YARN
        stated = {"rope_type": scaling.rope_type, "factor": scaling.factor}
        stated |= {n: getattr(scaling, n) for n in names if getattr(scaling, n) or n in _LLAMA3}
        stated["original_max_position_embeddings"] = scaling.original_max_positions
    if spec.family.keys.get("rope") == "rope_parameters":
        extra = {"partial_rotary_factor": spec.rotary} if part else {}
        return {"rope_parameters": {"rope_type": "default", **stated, "rope_theta": spec.rope_theta, **extra}}
    out: dict[str, Any] = {"rope_theta": spec.rope_theta, "rope_scaling": stated or None}
    if part == "rotary_dim":
        out["rotary_dim"] = int(spec.rotary * spec.head_dim)
    elif part:
        out["partial_rotary_factor"] = spec.rotary
    return out


def read_moe(found: Reading, text: Mapping[str, Any]) -> None:
    """Shared experts and dense layers."""
    keys, ffn = found.family.keys, found.values.get("moe.ffn")
    shared = keys.get("moe.shared_ffn")
    if shared is None:
        stated = [k for k in ("n_shared_experts", "shared_expert_intermediate_size") if text.get(k)]
        found.strange += [f"{k} is {text[k]!r}, expected none" for k in stated]
    elif shared not in text:
        found.missing.append(shared)
    elif ffn is not None:
        found.values["moe.shared_ffn"] = int(text[shared] or 0) * (ffn if shared == "n_shared_experts" else 1)
    dense = _dense_layers(found, text)
    if dense is None:
        found.missing.append(keys.get("moe.dense_layers", ""))
    elif dense and "moe.dense_layers" not in keys:
        found.strange.append(f"{dense} layers have a dense MLP, expected none")
    found.values["moe.dense_layers"] = dense or 0


def _dense_layers(found: Reading, text: Mapping[str, Any]) -> int | None:
    """Leading layers with a dense MLP; None: the config does not say and has to."""
    key = next((k for k in DENSE_KEYS if text.get(k) is not None), None)
    if key is None:
        return None if found.family.keys.get("moe.dense_layers") in DENSE_KEYS[:2] else 0
    if key == "first_k_dense_replace":
        return int(text[key])
    layers = int(found.values.get("layers") or 0)
    if key == "mlp_only_layers":
        dense = sorted(int(i) for i in text[key])
    else:
        dense = [i for i, kind in enumerate(text[key][:layers]) if kind == "dense"]
    if dense != list(range(len(dense))):
        found.strange.append(f"{key}: the layers with a dense MLP are {dense}, expected the first ones")
    return len(dense)


def read_linear(found: Reading, text: Mapping[str, Any]) -> None:
    """Which layers are full attention."""
    layers, stated = found.values.get("layers"), text.get("full_attention_interval")
    kinds = text.get("layer_types")
    if kinds is None or not layers:
        if stated is None:
            found.missing.append("layer_types")
        else:
            found.values["linear.full_every"] = int(stated)
        return
    usual = GatedDelta.__dataclass_fields__["full_every"].default
    tries = [int(stated)] if stated else [usual, *range(1, layers + 2)]
    every = next((n for n in tries if list(kinds) == layer_types(layers, n)), None)
    if every is None:
        told = f"every {stated}th layer" if stated else "full attention at a constant interval"
        found.strange.append(f"layer_types does not fit: expected {told}")
    found.values["linear.full_every"] = every or usual


def layer_types(layers: int, every: int) -> list[str]:
    """Kind of attention per layer of a hybrid model."""
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


def read_indexer(found: Reading, text: Mapping[str, Any]) -> None:
    """Which layers compute indices."""
    layers = int(found.values.get("layers") or 0)
    every = max(int(text.get("index_topk_freq") or 1), 1)
    offset = int(text.get("index_skip_topk_offset") or 2)
    kinds = text.get("indexer_types")
    if isinstance(text.get("index_topk_pattern"), str) and kinds is None:
        kinds = [{"F": "full", "S": "shared"}.get(c, c) for c in text["index_topk_pattern"]]
    if kinds is not None:
        tries = [(every, offset), *((e, o) for e in range(1, layers + 1) for o in range(1, layers + 1))]
        fit = next((t for t in tries if list(kinds)[:layers] == indexer_types(layers, *t)), None)
        if fit is None:
            found.strange.append("indexer_types does not fit: expected indices at a constant interval")
        every, offset = fit or (every, offset)
    found.values["indexer.every"] = every
    found.values["indexer.offset"] = offset if every > 1 else 1


def indexer_types(layers: int, every: int, offset: int) -> list[str]:
    """Per layer: `full` computes indices, `shared` reuses those of the last that did."""
    some = Indexer(heads=1, head_dim=1, top_k=1, every=every, offset=offset)
    return ["full" if some.computes(i) else "shared" for i in range(layers)]


def write_layers(spec: ModelSpec) -> dict[str, Any]:
    """What varies from layer to layer, and shared experts."""
    out: dict[str, Any] = {}
    keys = spec.family.keys
    if spec.moe:
        dense, shared = spec.moe.dense_layers, keys.get("moe.shared_ffn")
        sparse = spec.layers - dense
        forms = {
            "first_k_dense_replace": dense,
            "mlp_only_layers": list(range(dense)),
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * sparse,
        }
        named = keys.get("moe.dense_layers", "")
        out |= {
            k: forms[k] for k in forms if k == named or (named == "mlp_layer_types" and k == "first_k_dense_replace")
        }
        if shared:
            out[shared] = spec.moe.shared_ffn // (spec.moe.ffn if shared == "n_shared_experts" else 1)
    if spec.linear:
        every = spec.linear.full_every
        out |= {"full_attention_interval": every, "layer_types": layer_types(spec.layers, every)}
    if spec.indexer:
        every, offset = spec.indexer.every, spec.indexer.offset
        out |= {"index_topk_freq": every, "index_skip_topk_offset": offset}
        out["indexer_types"] = indexer_types(spec.layers, every, offset)
    return out

"""HF config.json <-> ModelSpec, by table: which config field says what, in the words of each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from slimecli.errors import DataError, nearest
from slimecli.model_specs import shapes
from slimecli.model_specs.spec import Family, GatedDelta, Indexer, Mla, ModelSpec, Moe, RopeScaling

SECTIONS: dict[str, type[Any]] = {"moe": Moe, "mla": Mla, "indexer": Indexer, "linear": GatedDelta}
"""ModelSpec fields that are tables of their own; a family has one if its traits name it"""

REQUIRED = object()


@dataclass(frozen=True)
class Field:
    """How one number of the spec is written in config.json."""

    key: str
    kind: Callable[[Any], Any] = int
    default: Any = REQUIRED
    """value where the config does not state the field"""
    common: bool = True
    """read in every family that has the section; otherwise only where Family.keys names the field"""
    also: tuple[str, ...] = ()
    """other names under which it is read"""


def _nullable(value: Any) -> int:
    return int(value or 0)


def _norm(value: Any) -> str:
    return "head" if value else ""


TABLE: dict[str, Field] = {
    "layers": Field("num_hidden_layers"),
    "hidden": Field("hidden_size"),
    "ffn": Field("intermediate_size"),
    "heads": Field("num_attention_heads"),
    "vocab": Field("vocab_size"),
    "eps": Field("rms_norm_eps", float),
    "tied": Field("tie_word_embeddings", bool, False),
    "max_positions": Field("max_position_embeddings"),
    "qkv_bias": Field("attention_bias", bool, False, common=False),
    "qk_norm": Field("use_qk_norm", _norm, "", common=False),
    "gated": Field("attn_output_gate", bool, False, common=False),
    "interleaved": Field("rope_interleave", bool, False, common=False),
    "mtp": Field("num_nextn_predict_layers", int, 0, common=False, also=("num_mtp_layers", "mtp_num_hidden_layers")),
    "moe.experts": Field("n_routed_experts", also=("num_experts", "num_local_experts")),
    "moe.top_k": Field("num_experts_per_tok"),
    "moe.ffn": Field("moe_intermediate_size"),
    "moe.normalize": Field("norm_topk_prob", bool),
    "moe.score": Field("scoring_func", str, "softmax", common=False),
    "moe.scale": Field("routed_scaling_factor", float, 1.0, common=False),
    "moe.groups": Field("n_group", int, 1, common=False),
    "moe.top_groups": Field("topk_group", int, 1, common=False),
    "moe.bias": Field("use_routing_bias", bool, False, common=False),
    "mla.q_rank": Field("q_lora_rank", _nullable),
    "mla.kv_rank": Field("kv_lora_rank"),
    "mla.nope_dim": Field("qk_nope_head_dim"),
    "mla.rope_dim": Field("qk_rope_head_dim"),
    "mla.v_dim": Field("v_head_dim"),
    "indexer.heads": Field("index_n_heads"),
    "indexer.head_dim": Field("index_head_dim"),
    "indexer.top_k": Field("index_topk"),
    "linear.key_heads": Field("linear_num_key_heads"),
    "linear.value_heads": Field("linear_num_value_heads"),
    "linear.key_dim": Field("linear_key_head_dim"),
    "linear.value_dim": Field("linear_value_head_dim"),
    "linear.conv": Field("linear_conv_kernel_dim"),
}
"""spec field -> config field; what takes more than renaming (layer lists, shared experts, rope) is in shapes.py"""

POSITIVE = ("layers", "hidden", "heads", "vocab", "max_positions", "moe.experts", "moe.top_k", "moe.ffn")
"""fields of TABLE that no model has less than one of"""

INERT: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "moe_layer_freq": (1,),
    "decoder_sparse_step": (1,),
    "shared_intermediate_size": (0,),
    "mtp_use_dedicated_embeddings": (False,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
}
"""config fields that change the model, and the values at which they do not"""

WINDOWED, LINEAR = ("sliding_attention", "chunked_attention"), "linear_attention"
"""values of layer_types that make another model"""

STORED = ("fp8", "compressed-tensors")
"""quantizations that say how the weights are stored, not that the model is another one"""

FOREIGN: dict[str, tuple[str, ...]] = {
    "moe": ("num_experts", "n_routed_experts", "num_local_experts"),
    "mla": ("kv_lora_rank", "q_lora_rank"),
    "indexer": ("index_topk", "index_n_heads"),
    "linear": ("linear_num_key_heads", "linear_num_value_heads"),
}
"""config fields that give a model a section; a family without the section cannot have them"""


@dataclass
class Reading:
    """What a config says, in the words of the spec, and what is wrong with it."""

    family: Family
    values: dict[str, Any] = field(default_factory=dict)
    """flat: `layers`, `moe.top_k`..."""
    missing: list[str] = field(default_factory=list)
    """config fields that are needed and absent"""
    strange: list[str] = field(default_factory=list)
    """what this family cannot express"""
    readable: bool = True
    """False: some value is not of its type, so that there is no spec to speak of"""

    def spec(self, name: str, **extra: Any) -> ModelSpec:
        """The spec of the values read; only if nothing is missing."""
        return build(name, self.family, nest(self.values), **extra)


def build(name: str, family: Family, numbers: Mapping[str, Any], **extra: Any) -> ModelSpec:
    """A spec from nested tables of numbers, as they stand in a registry file."""
    values = {k: v for k, v in numbers.items() if k not in SECTIONS and k != "rope_scaling"}
    for section, kind in SECTIONS.items():
        if section in numbers:
            values[section] = kind(**numbers[section])
    scaling = numbers.get("rope_scaling")
    values["rope_scaling"] = RopeScaling(**scaling) if isinstance(scaling, Mapping) and scaling else scaling or None
    if "mla" in values:
        values.setdefault("head_dim", values["mla"].rope_dim)
        values.setdefault("kv_heads", values["heads"])
    return ModelSpec(name=name, family=family, **{**values, **extra})


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"moe.top_k": 8} -> {"moe": {"top_k": 8}}."""
    out: dict[str, Any] = {}
    for path, value in flat.items():
        section, _, name = path.rpartition(".")
        (out.setdefault(section, {}) if section else out)[name] = value
    return out


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """{"moe": {"top_k": 8}} -> {"moe.top_k": 8}."""
    out: dict[str, Any] = {}
    for key, value in nested.items():
        out |= {f"{key}.{k}": v for k, v in value.items()} if key in SECTIONS else {key: value}
    return out


def merge(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Later tables win; sections are merged field by field."""
    out: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = key in SECTIONS and isinstance(out.get(key), Mapping)
            out[key] = {**out[key], **value} if both else value
    return out


def trait(family: Family, path: str) -> Any:
    """What the family's traits say of a spec field; None: nothing."""
    return flatten(family.traits).get(path)


def text_part(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The part of a config.json that describes the language model."""
    if not family.nested:
        return dict(config)
    inner = config.get(family.nested)
    if not isinstance(inner, Mapping):
        raise DataError(f"config.json lacks {family.nested}", "use the config.json that came with the weights")
    return {**{k: config[k] for k in ("tie_word_embeddings",) if k in config}, **inner}


def read(config: Mapping[str, Any], known: Mapping[str, Family]) -> Reading:
    """Read a config of a known family; raises DataError only where the family itself is unknown."""
    if not isinstance(config, Mapping):
        raise DataError("config.json is no JSON object", "use the config.json that came with the weights")
    kind = str(config.get("model_type", ""))
    family = known.get(kind)
    if family is None:
        raise DataError(
            f"model_type {kind!r} is of no known family{nearest(kind, list(known))}",
            f"known families: {', '.join(sorted(known))}",
        )
    text = text_part(config, family)
    found = Reading(family, flatten(family.traits))
    try:
        _read_all(found, text)
    except (TypeError, ValueError) as error:
        found.strange.append(f"a value is not of its type: {error}")
        found.readable = False
    found.strange += _strange(text, family) + _storage(config, text)
    return found


def _impossible(values: Mapping[str, Any]) -> list[str]:
    """Numbers that no model can have."""
    out = [f"{TABLE[k].key} is {values[k]}, expected at least 1" for k in POSITIVE if values.get(k, 1) < 1]
    heads, kv_heads = values.get("heads", 1), values.get("kv_heads", 1)
    if not out and (kv_heads < 1 or heads % kv_heads):
        out.append(f"num_key_value_heads is {kv_heads}, which does not divide {heads} heads")
    return out


def _read_all(found: Reading, text: Mapping[str, Any]) -> None:
    traits = found.family.traits
    for path, entry in TABLE.items():
        section = path.rpartition(".")[0]
        if not section or section in traits:
            _read_field(found, path, entry, text)
    shapes.read_heads(found, text)
    shapes.read_rope(found, text)
    if "moe" in traits:
        shapes.read_moe(found, text)
    if "linear" in traits:
        shapes.read_linear(found, text)
    if "indexer" in traits:
        shapes.read_indexer(found, text)


def _read_field(found: Reading, path: str, entry: Field, text: Mapping[str, Any]) -> None:
    """One field of the table: from its key, else from the family's traits, else its default."""
    fixed, named = trait(found.family, path), found.family.keys.get(path)
    names = (named or entry.key, entry.key, *entry.also)
    key = next((n for n in names if text.get(n) is not None), None)
    value = fixed if fixed is not None else entry.default
    stated = value if key is None else _convert(key, entry.kind, text[key])
    if named is None and not (entry.common and fixed is None):  # one value in the family, whether stated or not
        if stated != value and not (path == "qk_norm" and bool(stated) == bool(value)):
            found.strange.append(f"{key} is {text[key or '']!r}, expected {value!r}")
        stated = value
    elif key is None and names[0] in text and path == "mla.q_rank":
        stated = 0
    if stated is REQUIRED:
        found.missing.append(names[0])
    else:
        found.values[path] = stated


def _convert(key: str, kind: Callable[[Any], Any], value: Any) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key} is {value!r}") from None


def _strange(text: Mapping[str, Any], family: Family) -> list[str]:
    """Fields that would make this another model than the family's layout can express."""
    out = []
    for key, inert in {**INERT, **{k: (v,) for k, v in family.fixed.items()}}.items():
        value = text.get(key)
        if key in text and value is not None and value not in inert and key not in family.keys.values():
            out.append(f"{key} is {value!r}, expected {inert[0]!r}")
    out += [f"{key} is {text[key]!r}, expected none" for key in family.absent if text.get(key) is not None]
    windowed = set(text.get("layer_types") or ()) & set(WINDOWED if "linear" in family.traits else (*WINDOWED, LINEAR))
    out += [f"layer_types has {kind!r}, which this family does not" for kind in sorted(windowed)]
    for section, keys in FOREIGN.items():
        if section not in family.traits:
            out += [f"{k} is {text[k]!r}, expected none" for k in keys if text.get(k)]
    return out


def _storage(config: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """What is wrong with the way the weights are stored; slimecli.weights.quant looks at the details."""
    stored = config.get("quantization_config") or text.get("quantization_config") or {}
    method = stored.get("quant_method") if isinstance(stored, Mapping) else stored
    return [] if not stored or method in STORED else [f"quantization_config is {method!r}, expected {STORED[0]!r}"]


def from_config(config: Mapping[str, Any], known: Mapping[str, Family], name: str = "") -> ModelSpec:
    """The spec that a config describes; see registry.from_config."""
    found = read(config, known)
    if found.missing:
        raise DataError(
            f"config.json lacks {', '.join(found.missing)}", "use the config.json that came with the weights"
        )
    if problems := found.strange + _impossible(found.values):
        raise DataError(
            f"config.json: {'; '.join(problems)}", f"a {found.family.model_type} model is not known to have this"
        )
    return found.spec(name or str(config.get("_name_or_path") or found.family.model_type), source="config.json")


def to_config(spec: ModelSpec, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json as transformers and SGLang read it."""
    family = spec.family
    text: dict[str, Any] = dict(family.fixed)
    for path, entry in TABLE.items():
        section, _, name = path.rpartition(".")
        owner = getattr(spec, section) if section else spec
        named = family.keys.get(path)
        if owner is None or (named is None and not (entry.common and trait(family, path) is None)):
            continue
        value = getattr(owner, name)
        text[named or entry.key] = (
            bool(value) if path == "qk_norm" else value or None if path == "mla.q_rank" else value
        )
    text |= shapes.write_heads(spec) | shapes.write_rope(spec) | shapes.write_layers(spec)
    text |= {"torch_dtype": dtype, "use_cache": True}
    outer: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    if not family.nested:
        return {**outer, **text}
    inner = {"model_type": f"{family.model_type}_text", **text}
    return {**outer, "tie_word_embeddings": spec.tied, "torch_dtype": dtype, family.nested: inner}


def differences(spec: ModelSpec, config: Mapping[str, Any], known: Mapping[str, Family]) -> list[str]:
    """Every field in which a config differs from the spec, as `moe.top_k: spec 8, config 6`."""
    try:
        found = read(config, known)
    except DataError as error:
        return [error.what]
    out = [f"config.json lacks {', '.join(found.missing)}"] if found.missing else []
    out += [f"config.json: {line}" for line in found.strange]
    if spec.family.model_type != found.family.model_type:
        out.append(f"model_type: spec {spec.family.model_type}, config {found.family.model_type}")
    if found.missing or not found.readable:
        return out
    other = found.spec("config")
    mine, theirs = flat(spec), flat(other)
    if not (spec.dense_layers or other.dense_layers):  # no weight has this width
        del mine["ffn"], theirs["ffn"]
    for path in {**mine, **theirs}:
        section = path.rpartition(".")[0]
        if mine.get(path) == theirs.get(path) or (section and not (section in mine and section in theirs)):
            continue
        if path == "rope_scaling":
            out.append(f"{path}: spec {_scaling(spec)}, config {_scaling(other)}")
        else:
            out.append(f"{path}: spec {_show(mine.get(path))}, config {_show(theirs.get(path))}")
    return out


def _scaling(spec: ModelSpec) -> str:
    return f"{spec.rope_scaling.rope_type} x{spec.rope_scaling.factor:g}" if spec.rope_scaling else "none"


def flat(spec: ModelSpec) -> dict[str, Any]:
    """The numbers of a spec by dotted name; a section that is there also has a line of its own."""
    skipped = {"name", "max_positions", "repo", "revision", "source", "note", "family"}
    out: dict[str, Any] = {}
    for item in fields(spec):
        value = getattr(spec, item.name)
        if item.name in SECTIONS or item.name == "rope_scaling":
            if value is not None:
                out[item.name] = "there"
                out |= {f"{item.name}.{f.name}": getattr(value, f.name) for f in fields(value)}
        elif item.name not in skipped:
            out[item.name] = value
    return out


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None or value == "" else str(value)

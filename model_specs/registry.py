"""Name -> ModelSpec, from the TOML files beside this one; and config.json -> ModelSpec for models without an entry."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from slimecli.errors import DataError, UsageError, nearest
from slimecli.model_specs.spec import Family, ModelSpec, RopeScaling

FOLDER = Path(__file__).parent

_INERT = {
    "use_sliding_window": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "partial_rotary_factor": (1.0, None),
    "num_experts": (0, None),
    "quantization_config": (None,),
}
"""config fields that change the model, and the values at which they do not"""


@cache
def _files() -> tuple[dict[str, Family], dict[str, ModelSpec]]:
    known: dict[str, Family] = {}
    specs: dict[str, ModelSpec] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        family = Family(**{"fixed": {}, **data["family"]})
        known[family.model_type] = family
        for name, numbers in data["models"].items():
            scaling = numbers.pop("rope_scaling", None)
            specs[name] = ModelSpec(
                name=name,
                family=family,
                rope_scaling=RopeScaling(**scaling) if scaling else None,
                **{**family.traits, **data.get("defaults", {}), **numbers},
            )
    return known, specs


def families() -> dict[str, Family]:
    """HF model_type -> Family."""
    return dict(_files()[0])


def registry() -> dict[str, ModelSpec]:
    """Every known model by name."""
    return dict(_files()[1])


def get_spec(name: str) -> ModelSpec:
    """The model of that name; hub repository names are understood too, and case does not matter."""
    specs = registry()
    low = name.lower()
    by_repo = {s.repo.lower(): s for s in specs.values() if s.repo}
    found = specs.get(low) or by_repo.get(low)
    if found is None:
        raise UsageError(
            f"no model {name!r} in the registry{nearest(low, list(specs))}",
            "`slime models` lists them; a local HF folder of a known family needs no entry: give its path",
        )
    return found


def from_config(config: Mapping[str, Any], name: str = "") -> ModelSpec:
    """The spec that an HF config.json describes.

    Raises DataError for an unknown family, a missing number, or a field whose value this family does not have.
    """
    kind = str(config.get("model_type", ""))
    family = families().get(kind)
    if family is None:
        raise DataError(
            f"model_type {kind!r} is of no known family{nearest(kind, list(families()))}",
            f"known families: {', '.join(sorted(families()))}",
        )
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [k for k in needed if config.get(k) is None]
    if missing:
        raise DataError(f"config.json lacks {', '.join(missing)}", "use the config.json that came with the weights")
    strange = _strange(config, family)
    if strange:
        raise DataError(f"config.json: {'; '.join(strange)}", f"a {kind} model is not known to have this")
    theta, scaling = _rope(config)
    heads = int(config["num_attention_heads"])
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or kind),
        family=family,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        ffn=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocab=int(config["vocab_size"]),
        rope_theta=theta,
        rope_scaling=scaling,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings", 0)),
        source="config.json",
        **family.traits,
    )


def _strange(config: Mapping[str, Any], family: Family) -> list[str]:
    """Fields that would make this another model than the family's layout can express."""
    out = []
    for key, inert in _INERT.items():
        expected = (family.fixed[key],) if key in family.fixed else inert
        if key in config and config[key] not in expected and config[key] is not None:
            out.append(f"{key} is {config[key]!r}, expected {expected[0]!r}")
    return out


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from either of the two forms that transformers has written."""
    parameters: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    known = {f.name for f in dataclasses.fields(RopeScaling)}
    renamed = {"original_max_position_embeddings": "original_max_positions"}
    values = {renamed.get(k, k): v for k, v in parameters.items()}
    values = {k: v for k, v in values.items() if k in known} | {"rope_type": kind}
    if kind != "llama3" or "factor" not in values:
        raise DataError(f"config.json: rope scaling of type {kind!r} is not supported", "only `llama3` scaling is")
    return theta, RopeScaling(**values)

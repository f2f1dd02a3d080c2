"""Name -> ModelSpec, from the TOML files beside this one; and config.json -> ModelSpec for models without an entry."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from slimecli.errors import UsageError, nearest
from slimecli.model_specs import config
from slimecli.model_specs.spec import Family, ModelSpec

FOLDER = Path(__file__).parent


@cache
def _files() -> tuple[dict[str, Family], dict[str, ModelSpec]]:
    known: dict[str, Family] = {}
    specs: dict[str, ModelSpec] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        family = Family(**data["family"])
        known[family.model_type] = family
        for name, numbers in data.get("models", {}).items():
            merged = config.merge(family.traits, data.get("defaults", {}), numbers)
            specs[name] = config.build(name, family, merged)
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


def from_config(values: Mapping[str, Any], name: str = "") -> ModelSpec:
    """The spec that an HF config.json describes.

    Raises DataError for an unknown family, a missing number, or a field whose value this family does not have.
    """
    return config.from_config(values, families(), name)

"""Registries are dicts name -> "module:attr"; this turns a name into the object behind it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from slimecli.errors import SlimeError, UsageError, nearest


def look_up(
    registry: Mapping[str, str], name: str, what: str, fix: str = "", error: type[SlimeError] = UsageError
) -> Any:
    """The object that a registry has under `name`; its module is imported now.

    Args:
        registry: name -> "module:attr".
        what: what such a name stands for, e.g. "reward type".
        fix: what to do about a wrong name; {known} becomes the list of all names.
        error: raised for a wrong name.
    """
    if name not in registry:
        known = ", ".join(registry)
        raise error(
            f"no {what} {name!r}{nearest(name, list(registry))}", (fix or "known: {known}").replace("{known}", known)
        )
    module, _, attribute = registry[name].partition(":")
    return getattr(importlib.import_module(module), attribute)

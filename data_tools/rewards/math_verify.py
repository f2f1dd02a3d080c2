"""Equality as the package math-verify sees it: it reads LaTeX with a grammar, and sets, intervals and relations."""

from __future__ import annotations

import importlib.util
from typing import Any

from slimecli.data_tools.rewards import solver
from slimecli.errors import DataError, UsageError


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the package math-verify (extra `math`) finds the label in the response."""
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError("reward math_verify needs the package math-verify", "pip install 'slimecli[math]'")
    if label is None or not label.strip():
        raise DataError("reward math_verify needs a label and the row has none", "check data.label_key")
    return float(solver.math_verify(response, label))

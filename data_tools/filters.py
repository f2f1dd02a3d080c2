"""Dynamic sampling: which finished groups are trained on. FILTERS: name -> function(args, samples) -> FilterResult."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimecli.data_tools.hooks import load_hook
from slimecli.errors import SlimeError
from slimecli.lookup import look_up
from slimecli.types import Group, SampleStatus

FILTERS: dict[str, str] = {
    "zero-variance": "slimecli.data_tools.filters:zero_variance",
    "check_reward_nonzero_std": "slimecli.data_tools.filters:zero_variance",
    "check_reward_nonzero_std_with_fallback": "slimecli.data_tools.filters:zero_variance_with_fallback",
}
"""name -> function; the check_... names are those slime's users know"""


@dataclass(frozen=True)
class FilterResult:
    """Verdict on one group."""

    keep: bool
    reason: str = ""
    """why it was dropped; counted by the rollout"""
    keep_when_insufficient: bool = False
    """a dropped group may be used after all when the step would otherwise need another round of sampling"""


Filter = Callable[..., FilterResult]


def load_filter(name: str) -> Filter:
    """A built-in filter, or one by path; its verdict is always a FilterResult."""
    if ":" not in name and "." not in name:
        found: Filter = look_up(FILTERS, name, "filter", "filters: {known}, or file.py:function")
        return found
    hook = load_hook(name, ("args", "samples"))

    def call(args: Any, samples: Group, **kwargs: Any) -> FilterResult:
        return _as_result(hook(args, samples, **kwargs), name)

    return call


def _as_result(verdict: Any, name: str) -> FilterResult:
    if isinstance(verdict, FilterResult):
        return verdict
    if isinstance(verdict, bool):
        return FilterResult(verdict, "" if verdict else name)
    if isinstance(getattr(verdict, "keep", None), bool):  # upstream's DynamicFilterOutput, or a look-alike
        insufficient = bool(getattr(verdict, "keep_when_insufficient", False))
        return FilterResult(verdict.keep, str(getattr(verdict, "reason", "") or ""), insufficient)
    raise SlimeError(f"filter {name} returned {verdict!r}", "return True, False, or an object with `keep` and `reason`")


def zero_variance(args: Any, samples: Group, **kwargs: Any) -> FilterResult:
    """Drop groups whose rewards are all equal: they carry no gradient."""
    key = getattr(args, "reward_key", None) or None
    rewards = [s.get_reward_value(key) for s in samples if s.status is not SampleStatus.FAILED]
    if len(rewards) > 1 and statistics.stdev(rewards) > 1e-6:
        return FilterResult(True)
    return FilterResult(False, f"zero_std_{round(rewards[0], 1)}" if rewards else "empty_group")


def zero_variance_with_fallback(args: Any, samples: Group, **kwargs: Any) -> FilterResult:
    """The same, but a dropped group may fill a step that would otherwise need another round of sampling."""
    verdict = zero_variance(args, samples, **kwargs)
    return verdict if verdict.keep else FilterResult(False, verdict.reason, keep_when_insufficient=True)

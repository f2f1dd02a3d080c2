"""Gates: what the recipe says must hold at every step, and the verdict when it does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slimecli.recipe_sections import GatesSection


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One broken gate.

    Example: Verdict(step=1, gate="gates.max_logprob_gap", metric="train/logprob_gap", value=0.3, limit=0.05,
    action="stop", meaning="...")
    """

    step: int
    gate: str
    """recipe field that sets the limit"""
    metric: str
    """key in metrics.jsonl"""
    value: float | None
    """measured; None when the step did not report it"""
    limit: float
    action: str
    """`warn` or `stop`"""
    meaning: str
    """what usually causes it"""

    def to_dict(self) -> dict[str, Any]:
        """A line of verdicts.jsonl."""
        return asdict(self)

    @property
    def what(self) -> str:
        """What is wrong, in one sentence."""
        measured = "was not measured" if self.value is None else f"is {self.value:.3g}, above {self.limit:.3g}"
        return f"step {self.step}: {self.metric} {measured}: {self.meaning}"

    @property
    def fix(self) -> str:
        """What the user can do."""
        return f"find the cause first; `--set gates.action=warn` only warns, a higher {self.gate} tolerates it"


_GATES = (
    (
        "max_logprob_gap",
        "train/logprob_gap",
        "engine and trainer give the sampled tokens other probabilities: other weights, dtype, template or kernel",
    ),
    (
        "first_step_kl",
        "train/first_step_kl",
        "policy, old policy and reference are one model at the first step, but their weights or log-probs differ",
    ),
    (
        "max_zero_variance",
        "rollout/zero_variance_fraction",
        "too many groups have no difference in reward and teach nothing: the task is too easy, too hard, or mis-scored",
    ),
)
"""(field of [gates], metric, usual cause)"""

ALWAYS_MEASURED = ("train/logprob_gap", "rollout/zero_variance_fraction")
"""metrics every RL step must report; one that is missing breaks its gate, so that a gate cannot fall silent"""


def check_gates(gates: GatesSection, step: int, metrics: Mapping[str, Any]) -> list[Verdict]:
    """The broken gates of one step. A value that is not a number breaks its gate.

    Args:
        metrics: the step's metrics.jsonl record. One without `rollout/reward` is an SFT step: nothing is sampled there,
            and only what it reports is judged.
    """
    is_rl = "rollout/reward" in metrics
    is_stale = metrics.get("rollout/staleness_max", 0) > 0
    broken = []
    for field, metric, meaning in _GATES:
        limit = float(getattr(gates, field))
        value = metrics.get(metric)
        if is_stale and metric == "train/logprob_gap" and math.isfinite(value or 0.0):
            continue  # older weights said some of the tokens: that alone makes a gap
        if value is None:
            holds = not (is_rl and metric in ALWAYS_MEASURED)
        else:
            holds = abs(float(value)) <= limit
        if not holds:
            broken.append(
                Verdict(
                    step=step,
                    gate=f"gates.{field}",
                    metric=metric,
                    value=None if value is None else float(value),
                    limit=limit,
                    action=gates.action,
                    meaning=meaning,
                )
            )
    return broken

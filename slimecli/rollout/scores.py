"""Statistics of an evaluation: means with errors that know that answers to one prompt are alike, pass@k, differences.

Answers to the same prompt are no independent draws, so every error is clustered by prompt (Miller 2024,
arXiv:2411.00640, eq. 4), with the usual factor C / (C - 1) for C prompts. For one answer a prompt that is the standard
error of a mean. Intervals are of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Z95 = 1.959964
"""half width of a 95 % interval in standard errors"""
CORRECT = 1.0
"""score from which an answer counts as correct for pass@k"""
_ROUNDING = 1e-9
"""standard errors below this are what rounding leaves of no difference between prompts"""

Interval = tuple[float, float]


def mean_with_error(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean over all answers, and its standard error clustered by prompt.

    Args:
        groups: [P][n] scores of the answers to each prompt; groups may differ in size, empty ones do not count.
    """
    groups = [g for g in groups if g]
    n = sum(len(g) for g in groups)
    mean = math.fsum(x for g in groups for x in g) / n
    squares = math.fsum(math.fsum(x - mean for x in g) ** 2 for g in groups)
    clusters = len(groups)
    return mean, math.sqrt(squares * clusters / (clusters - 1)) / n if clusters > 1 else 0.0


def interval(mean: float, stderr: float, prompts: int, *, is_share: bool) -> Interval:
    """95 % confidence interval.

    Of a share (values from 0 to 1) Wilson's, with the number of independent draws that has the same standard error;
    where all prompts agree, that is the number of prompts, so that 20 of 20 is not taken for certainty. Of anything
    else the normal one.
    """
    if not is_share:
        return mean - Z95 * stderr, mean + Z95 * stderr
    draws = mean * (1 - mean) / stderr**2 if stderr > _ROUNDING else float(prompts)
    centre = (mean + Z95**2 / (2 * draws)) / (1 + Z95**2 / draws)
    half = Z95 / (1 + Z95**2 / draws) * math.sqrt(max(mean * (1 - mean), 0.0) / draws + Z95**2 / (4 * draws**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise_scores(groups: Sequence[Sequence[float]]) -> dict[str, Any]:
    """{"mean", "stderr", "interval", "n", "prompts", "pass@k": {k: value}, "pass@k_interval": {k: [low, high]}}."""
    mean, stderr = mean_with_error(groups)
    flat = [x for g in groups for x in g]
    is_share = all(0.0 <= x <= 1.0 for x in flat)
    answered = sum(bool(g) for g in groups)
    passed = {k: mean_with_error([[c] for c in chances]) for k, chances in pass_chances(groups).items()}
    return {
        "mean": mean,
        "stderr": stderr,
        "interval": list(interval(mean, stderr, answered, is_share=is_share)),
        "n": len(flat),
        "prompts": len(groups),
        "pass@k": {str(k): value for k, (value, _) in passed.items()},
        "pass@k_interval": {str(k): list(interval(v, e, answered, is_share=True)) for k, (v, e) in passed.items()},
    }


def pass_chances(groups: Sequence[Sequence[float]]) -> dict[int, list[float]]:
    """k -> [P] unbiased pass@k of each prompt (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    For k = 1, 2, 4, ... up to the smallest group, and for its size itself.
    """
    groups = [g for g in groups if g]
    smallest = min((len(g) for g in groups), default=0)
    ks = sorted({2**i for i in range(smallest.bit_length()) if 2**i <= smallest} | ({smallest} if smallest else set()))
    counts = [(len(g), sum(x >= CORRECT for x in g)) for g in groups]
    return {k: [1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts] for k in ks}


def pass_at_k(groups: Sequence[Sequence[float]]) -> dict[int, float]:
    """Mean of `pass_chances` over the prompts."""
    return {k: sum(chances) / len(chances) for k, chances in pass_chances(groups).items()}


def paired_difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean of b minus mean of a over the prompts that both answered: {"difference", "stderr", "interval", "prompts"}.

    The error is that of the differences prompt by prompt (Miller 2024, section 4.2): what is hard for both cancels.
    """
    both = [(x, y) for x, y in zip(a, b, strict=True) if x and y]
    deltas = [[math.fsum(y) / len(y) - math.fsum(x) / len(x)] for x, y in both]
    mean, stderr = mean_with_error(deltas)
    return _difference(mean, stderr) | {"prompts": len(deltas), "paired": True}


def unpaired_difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The same for two sets of different prompts: errors add up."""
    (mean_a, error_a), (mean_b, error_b) = mean_with_error(a), mean_with_error(b)
    return _difference(mean_b - mean_a, math.hypot(error_a, error_b)) | {
        "prompts": min(len(a), len(b)),
        "paired": False,
    }


def _difference(mean: float, stderr: float) -> dict[str, Any]:
    return {
        "difference": mean,
        "stderr": stderr,
        "interval": list(interval(mean, stderr, 0, is_share=False)),
    }

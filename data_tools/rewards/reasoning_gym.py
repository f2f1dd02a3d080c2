"""reasoning-gym's own scorer of the data set that a row came from."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from slimecli.data_tools.rewards.extract import extract
from slimecli.errors import DataError, nearest


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 for what the package scores 1, else 0.0; with metadata.partial its own score between.

    Several of its scorers give a few hundredths to a wrong answer, which would reward nonsense: hence the cut.
    """
    stored = metadata.get("reasoning_gym")
    if not isinstance(stored, dict) or "entry" not in stored or "dataset" not in stored:
        raise DataError(
            "the row has no metadata.reasoning_gym with `dataset` and `entry`",
            "make the data with data.source = 'reasoning_gym:TASK', or choose another reward.type",
        )
    answer = extract(response, metadata)
    if not answer:
        return 0.0
    value = float(_scorer(stored["dataset"])(answer, stored["entry"]))
    return value if metadata.get("partial") else float(value >= 1.0)


_lock = threading.Lock()


def _scorer(dataset: str) -> Any:
    # scores run in threads, and a second thread would see the package half imported
    with _lock:
        return _load_scorer(dataset)


@cache
def _load_scorer(dataset: str) -> Any:
    import reasoning_gym  # noqa: F401 - registers every data set
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if dataset not in DATASETS:
        raise DataError(
            f"reasoning-gym has no data set {dataset!r}{nearest(dataset, list(DATASETS))}", "make the data anew"
        )
    return get_score_answer_fn(dataset)

"""slime's small types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimecli.types import Sample


@dataclass
class DynamicFilterOutput:
    """Verdict of a dynamic filter."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False

    def __post_init__(self) -> None:
        """Plugins give tensors and NumPy's booleans."""
        self.keep = bool(self.keep)


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns for training."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What a rollout function returns for evaluation."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class SingletonMeta(type):
    """One instance per class."""

    _instances: dict[type, Any] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """The first call's instance."""
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]


def pop_first(args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """The first groups of a buffer, taken out of it."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken

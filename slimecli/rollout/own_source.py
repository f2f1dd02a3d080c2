"""A data source of the user's own (`rollout.data_source`): a class with slime's methods, or with those of DataSource.

    class Mine:
        def __init__(self, args): ...
        def get_samples(self, num_samples): ...    # -> list of groups, each n_samples_per_prompt samples
        def save(self, rollout_id): ...            # optional, with load: keeps its own state where it likes
        def load(self, rollout_id): ...
        def state(self) / restore(self, state):    # better than save and load: JSON that goes into the checkpoint

Groups that are given back wait here, and are a part of the checkpoint; `add_samples` is never called.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from slimecli.errors import DataError, UsageError
from slimecli.rollout.args import HookArgs
from slimecli.types import Group, Sample


def own_source(path: str, args: HookArgs, n_samples: int, encode: Callable[[str], list[int]]) -> OwnSource:
    """The user's class as a DataSource.

    Args:
        encode: token ids of a prompt, for samples that come as text.
    """
    from slimecli.data_tools.hooks import load_hook

    instance = load_hook(path, ("args",))(args)
    get = getattr(instance, "get_samples", None) or getattr(instance, "take", None)
    if not callable(get):
        raise UsageError(f"rollout.data_source = {path!r} has no get_samples", "define get_samples(self, num_samples)")
    return OwnSource(path, instance, get, n_samples, encode)


class OwnSource:
    """Numbers what the user's class hands out, checks it, and keeps what is given back."""

    def __init__(
        self,
        path: str,
        instance: Any,
        get: Callable[[int], list[Group]],
        n_samples: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self._path = path
        self._instance = instance
        self._get = get
        self._n_samples = n_samples
        self._encode = encode
        self._next_group = self._next_sample = self._saved = 0
        self._buffer: list[Group] = []

    def take(self, n: int) -> list[Group]:
        """The next n groups: those given back first."""
        groups, self._buffer = self._buffer[:n], self._buffer[n:]
        if len(groups) < n:
            fresh = self._get(n - len(groups))
            if len(fresh) != n - len(groups):
                raise DataError(
                    f"rollout.data_source {self._path} gave {len(fresh)} of {n - len(groups)} groups",
                    "a source never ends: begin a new epoch",
                )
            groups += [self._numbered(group) for group in fresh]
        return groups

    def _numbered(self, group: Group) -> Group:
        if len(group) != self._n_samples or not all(isinstance(s, Sample) for s in group):
            raise DataError(
                f"rollout.data_source {self._path} gave a group that is not {self._n_samples} samples",
                "return rollout.n_samples_per_prompt samples per group",
            )
        for sample in group:
            if not sample.tokens and isinstance(sample.prompt, str):
                sample.tokens = self._encode(sample.prompt)
            if not sample.tokens:
                raise DataError(
                    f"rollout.data_source {self._path} gave a sample without prompt tokens",
                    "give it `tokens`, or `prompt` as text that is not empty",
                )
            sample.group_index, sample.index = self._next_group, self._next_sample
            self._next_sample += 1
        self._next_group += 1
        return group

    def give_back(self, groups: list[Group]) -> None:
        """Put groups first in line for the next take."""
        self._buffer = groups + self._buffer

    def prepare(self, n: int) -> None:
        """The user's class prepares by itself."""

    def state(self) -> dict[str, Any]:
        """Counters, buffer, and the state of the user's class."""
        own: Any = None
        if hasattr(self._instance, "state"):
            own = json.loads(json.dumps(self._instance.state()))
        elif hasattr(self._instance, "save"):
            self._saved += 1
            self._instance.save(self._saved)
        return {
            "own": own,
            "saved": self._saved,
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "buffer": [[s.to_dict() for s in g] for g in self._buffer],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        if "own" not in state:
            raise DataError("the checkpoint was made with another data source", "resume with the same one")
        if hasattr(self._instance, "restore"):
            self._instance.restore(state["own"])
        elif hasattr(self._instance, "load"):
            self._instance.load(state["saved"])
        self._saved = state["saved"]
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._buffer = [[Sample.from_dict(s) for s in g] for g in state["buffer"]]

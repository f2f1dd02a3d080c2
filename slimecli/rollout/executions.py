"""Samples cut from one execution belong together: one reward, one weight in statistics, one fate."""

from __future__ import annotations

from collections.abc import Sequence

from slimecli.types import Sample, SampleStatus


def executions(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by execution, in order of first appearance; one without a rollout_id is an execution of its own."""
    found: dict[tuple[str, int], list[Sample]] = {}
    for number, sample in enumerate(samples):
        key = ("own", number) if sample.rollout_id is None else ("shared", sample.rollout_id)
        found.setdefault(key, []).append(sample)
    return list(found.values())


def scores(group: Sequence[Sample], key: str | None) -> list[float]:
    """One score per execution that has not failed: the mean over its samples."""
    found = []
    for execution in executions(group):
        values = [s.get_reward_value(key) for s in execution if s.status is not SampleStatus.FAILED]
        if values:
            found.append(sum(values) / len(values))
    return found


def stats(samples: Sequence[Sample]) -> dict[str, float]:
    """Means of the numbers that generate functions noted as `metadata.stats`, over the samples that have them."""
    noted: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in (sample.metadata.get("stats") or {}).items():
            noted.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in sorted(noted.items())}


def seconds_outside(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean and longest time that an execution spent in tools and environments (seconds); {} where none did."""
    spent = [sum(s.non_generation_time for s in execution) for execution in executions(samples)]
    if not any(spent):
        return {}
    return {"non_generation_mean": sum(spent) / len(spent), "non_generation_max": max(spent)}


def rewarded(sample: Sample) -> bool:
    """Whether a sample is scored itself: of the segments of one conversation only the last is, where the answer is."""
    return bool(sample.metadata.get("segment", 0) == sample.metadata.get("segments", 1) - 1)


def share_rewards(samples: Sequence[Sample]) -> None:
    """Give every earlier segment the reward, or the failure, of its execution's last one."""
    for execution in executions(samples):
        last = next((s for s in execution if s.metadata.get("segments") and rewarded(s)), None)
        for sample in execution:
            if last is None or rewarded(sample) or sample.reward is not None:
                continue
            if last.status is SampleStatus.FAILED:
                sample.status = SampleStatus.FAILED
                sample.metadata = {**sample.metadata, "failure": last.metadata.get("failure", "")}
            else:
                sample.reward = dict(last.reward) if isinstance(last.reward, dict) else last.reward

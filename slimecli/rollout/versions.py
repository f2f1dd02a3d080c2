"""How old the weights behind an answer are, and what is done about tokens that are too old.

Versions are numbers of steps: step k trains weights k-1 and makes weights k. An answer whose oldest token was said by
weights v is k-1-v versions old where step k trains on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slimecli.recipe_rollout import RolloutSection
from slimecli.rollout.segments import OWN_METADATA
from slimecli.types import Group, Sample, SampleStatus


def oldest_version(sample: Sample) -> int | None:
    """The oldest weights that spoke a token of it; None where nobody told."""
    known = [int(v) for v in sample.weight_versions if v.isdigit()]
    return min(known, default=None)


def age(sample: Sample, step: int) -> int:
    """Versions that its oldest token lies behind the weights that `step` trains; 0 where nobody told."""
    version = oldest_version(sample)
    return 0 if version is None else max(0, step - 1 - version)


def stamp(samples: Iterable[Sample], version: int) -> None:
    """Note the weights an answer was begun with where its generate function did not: the oldest it can come from."""
    for sample in samples:
        if not sample.weight_versions and sample.response_length:
            sample.weight_versions = [str(version)]


def as_prompt(sample: Sample) -> Sample:
    """The pending sample that an answer began as."""
    metadata = {k: v for k, v in sample.metadata.items() if k not in ("failure", *OWN_METADATA)}
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=sample.prompt,
        tokens=sample.tokens[: sample.prompt_length],
        label=sample.label,
        metadata=metadata,
        session_id=sample.session_id,
    )


def as_prompts(group: Group) -> Group:
    """Pending samples of a group; of samples cut from one execution, the one that began it."""
    first: dict[int | None, Sample] = {}
    for sample in group:
        key = sample.index if sample.rollout_id is None else sample.rollout_id
        if key not in first or sample.prompt_length < first[key].prompt_length:
            first[key] = sample
    return [as_prompt(s) for s in first.values()]


def mask_before(sample: Sample, version: int) -> None:
    """Do not train on tokens of weights older than `version`. Without spans, the whole answer counts as its oldest."""
    spans = sample.version_spans or [[oldest_version(sample) or 0, 0, sample.response_length]]
    mask = list(sample.mask)
    for spoken, start, end in spans:
        if not str(spoken).isdigit() or int(spoken) < version:
            mask[start:end] = [0] * (end - start)
    sample.loss_mask = mask


def bounded(group: Group, step: int, section: RolloutSection) -> tuple[Group, int]:
    """The group without tokens that `step` may not train on, and the number of answers that had some.

    `drop` begins those answers anew; the others of the group stay as they are, unless one execution made several
    samples: then the group begins anew as a whole.
    """
    floor = step - 1 - section.oldest
    old = [s for s in group if (version := oldest_version(s)) is not None and version < floor]
    if not old:
        return group, 0
    if section.stale == "mask":
        for sample in old:
            mask_before(sample, floor)
        return group, len(old)
    if any(s.rollout_id is not None for s in group):
        return as_prompts(group), len(old)
    gone = {id(s) for s in old}
    return [as_prompt(s) if id(s) in gone else s for s in group], len(old)


def mask_said(group: Group) -> None:
    """Before a group is continued: do not train on what its answers have said so far."""
    for sample in group:
        if sample.response_length or "unfinished" in sample.metadata:  # the latter keeps what it said there
            sample.loss_mask = [0] * sample.response_length


def age_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Ages of a batch, and the share of answers that several versions spoke."""
    finished = [s for g in groups for s in g if s.status is not SampleStatus.FAILED]
    ages = [age(s, step) for s in finished]
    return {
        "rollout/staleness_mean": sum(ages) / len(ages),
        "rollout/staleness_max": float(max(ages)),
        "rollout/partial_fraction": sum(len(s.weight_versions) > 1 for s in finished) / len(finished),
    }

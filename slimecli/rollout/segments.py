"""Training samples of one execution, built from its turns: token ids in, the same token ids out.

An execution (an agent's work on one prompt) asks the engine several times. Every request states all that was said
before; what it states is compared with what was said, token by token:

    clean      the request continues what was said: the new tokens between are the environment's, with loss mask 0
    realigned  the request tells differently what the model had said (a chat template that drops earlier thinking,
               a client that trims white space): the model never spoke that text, so a new segment begins
    forked     the request branches off, at something that the model did not say, or where it is asked again: a
               sub-agent, another try, a shortened history; a new segment begins

A segment is one linear sequence of tokens, and becomes one sample. Its prompt is all that the first request of the
segment said. So every turn is trained on in exactly one sample, the one in which it was spoken; where a later segment
repeats it, it is prompt. Nothing is ever tokenized again.

    P u1 a1 u2 a2          -> one sample:  prompt P u1, response a1 u2 a2, mask 1 on a1 and a2
    P u1 a1 | P u2 b1      -> two samples: P u1 -> a1, and P u2 -> b1
    P a1 u2 a2 | P a1 v2 c -> two samples: P -> a1 u2 a2, and P a1 v2 -> c (a1 is trained on once, in the first)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from slimecli.errors import DataError, SlimeError
from slimecli.types import LAST_TURN, Sample, SampleStatus

FINISHED: dict[str, SampleStatus] = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}
"""SGLang's finish_reason.type -> how the answer ended"""

OWN_METADATA = ("turns", "segment", "segments", "stats", "unfinished", LAST_TURN)
"""what is noted about an execution in the metadata of its samples"""

OnBreak = Literal["segment", "error"]


class Join(StrEnum):
    """How a request continues what was said before."""

    FIRST = "first"
    CLEAN = "clean"
    REALIGNED = "realigned"
    FORKED = "forked"


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Where a turn went."""

    kind: Join
    segment: int
    """number of the segment, in the order in which they began"""
    shared: int
    """tokens of the request that the segment it continues or leaves had said (its common prefix)"""


@dataclass(kw_only=True)
class Segment:
    """One linear sequence of tokens."""

    tokens: list[int]
    """[prompt + response] token ids"""
    prompt_length: int
    mask: list[int] = field(default_factory=list)
    """[response] 1 where the model spoke and is trained on"""
    log_probs: list[float] = field(default_factory=list)
    """[response] as sampled; 0.0 where not trained on"""
    spoken: list[tuple[int, int]] = field(default_factory=list)
    """start and end of every turn of the model, as positions in tokens"""
    versions: list[str] = field(default_factory=list)
    """weight versions in order of first use"""
    version_spans: list[list[Any]] = field(default_factory=list)
    """[version, start, end]: who spoke response tokens start..end-1"""
    finish: str = "stop"
    """SGLang's finish_reason.type of its last turn"""
    cut: bool = False
    """the limit on tokens ended it"""

    @property
    def status(self) -> SampleStatus:
        """How it ended."""
        return SampleStatus.TRUNCATED if self.cut else FINISHED[self.finish]

    def spoke_at(self, position: int) -> bool:
        """Whether the model said the token at a position."""
        return any(start <= position < end for start, end in self.spoken)


class Trajectory:
    """The turns of one execution.

    Args:
        on_break: what a realigned request means: `segment` begins a new one, `error` raises SlimeError.
        linear: True where there is one conversation and no branch: a fork counts as realigned.
        max_tokens: longest sequence that is trained on (tokens); what is beyond it is cut off and the sample truncated.
            0: no limit.
    """

    def __init__(self, *, on_break: OnBreak = "segment", linear: bool = False, max_tokens: int = 0) -> None:
        self._on_break = on_break
        self._linear = linear
        self._max_tokens = max_tokens
        self._segments: list[Segment] = []
        self.turns = 0
        """turns appended"""
        self.breaks = 0
        """how many of them were realigned"""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, in the order in which they began."""
        return tuple(self._segments)

    def append_turn(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[str | tuple[str, int, int]],
        finish_reason: str,
        trained: bool = True,
    ) -> Joined:
        """Add one request and the engine's answer to it.

        Args:
            prompt_ids: everything that the engine was given.
            output_ids: what it said.
            log_probs: [output_ids] log-probability of each token as sampled.
            versions: weight versions that spoke, in order of first use; as (version, start, end) where it is known
                which of the output's tokens are whose. Without that, all of them count as the first one's.
            finish_reason: SGLang's finish_reason.type: stop, length or abort.
            trained: False gives this turn the loss mask 0.
        """
        _check_turn(prompt_ids, output_ids, log_probs, finish_reason)
        prompt, joined = list(prompt_ids), self.join(prompt_ids)
        if joined.kind is Join.REALIGNED:
            if self._on_break == "error":
                raise self._broken(joined, prompt)
            self.breaks += 1
        self.turns += 1
        if joined.kind is Join.CLEAN:
            segment = self._segments[joined.segment]
        else:
            segment = Segment(tokens=prompt, prompt_length=len(prompt))
            self._segments.append(segment)
        if segment.cut or self._is_full(segment, prompt):
            segment.cut = True
            return joined
        between = len(prompt) - len(segment.tokens)
        start = len(prompt)
        room = max(self._max_tokens - start, 0) if self._max_tokens else len(output_ids)
        said, probs = list(output_ids[:room]), [min(x, 0.0) for x in log_probs[:room]]
        segment.cut = len(said) < len(output_ids)
        segment.finish = finish_reason
        segment.tokens = prompt + said
        segment.mask += [0] * between + [int(trained)] * len(said)
        segment.log_probs += [0.0] * between + (probs if trained else [0.0] * len(said))
        segment.spoken.append((start, start + len(said)))
        self._note_versions(segment, versions, start, len(said))
        return joined

    def join(self, prompt_ids: Sequence[int]) -> Joined:
        """How a request would continue what was said so far."""
        if not self._segments:
            return Joined(kind=Join.FIRST, segment=0, shared=0)
        prompt = list(prompt_ids)
        shared = [common_prefix(s.tokens, prompt) for s in self._segments]
        whole = [i for i, s in enumerate(self._segments) if shared[i] == len(s.tokens)]
        if whole:
            best = max(whole, key=lambda i: shared[i])
            return Joined(kind=Join.CLEAN, segment=best, shared=shared[best])
        best = max(range(len(shared)), key=lambda i: shared[i])
        at = shared[best]
        retold = at < len(prompt) and self._segments[best].spoke_at(at)
        kind = Join.REALIGNED if retold or self._linear else Join.FORKED
        return Joined(kind=kind, segment=len(self._segments), shared=at)

    def samples(self, base: Sample, decode: Callable[[list[int]], str] | None = None) -> list[Sample]:
        """One sample per segment that has something to train on; one without, if no segment has.

        They share group_index, index, session_id, label and the execution's rollout_id (base's, or else its index), and
        have no reward yet. `metadata.segment` and `metadata.segments` number them where there are several,
        `metadata.turns` counts the model's turns in each.

        Args:
            base: the pending sample that the execution worked on.
            decode: token ids -> text; without it prompt and response texts stay empty, except the first prompt's.
        """
        kept = [s for s in self._segments if any(s.mask)] or self._segments[-1:]
        rollout_id = base.index if base.rollout_id is None else base.rollout_id
        stated = {k: v for k, v in base.metadata.items() if k not in OWN_METADATA}  # of an execution that began before
        result = []
        for number, segment in enumerate(kept):
            prompt, response = segment.tokens[: segment.prompt_length], segment.tokens[segment.prompt_length :]
            metadata = stated | {"turns": len(segment.spoken)}
            if len(kept) > 1:
                metadata |= {"segment": number, "segments": len(kept)}
            sample = replace(
                base,
                rollout_id=rollout_id,
                prompt=base.prompt if prompt == base.tokens else decode(prompt) if decode else "",
                tokens=list(segment.tokens),
                response=decode(response) if decode else "",
                response_length=len(response),
                loss_mask=list(segment.mask),
                rollout_log_probs=list(segment.log_probs),
                weight_versions=list(segment.versions),
                version_spans=[list(span) for span in segment.version_spans],
                status=segment.status,
                metadata=metadata,
                sampling=dict(base.sampling),
            )
            result.append(sample)
        return result

    @staticmethod
    def _note_versions(
        segment: Segment, versions: Sequence[str | tuple[str, int, int]], start: int, length: int
    ) -> None:
        begin = start - segment.prompt_length
        spans = [v for v in versions if not isinstance(v, str)] or [(str(v), 0, length) for v in versions[:1]]
        for version, low, high in spans:
            if low < min(high, length):
                segment.version_spans.append([version, begin + low, begin + min(high, length)])
        names = [v if isinstance(v, str) else v[0] for v in versions]
        segment.versions += [v for v in dict.fromkeys(names) if v not in segment.versions]

    def _is_full(self, segment: Segment, prompt: list[int]) -> bool:
        """No token of the answer fits any more; what the environment said last is not worth keeping then."""
        full = bool(self._max_tokens) and len(prompt) >= self._max_tokens
        if full and not segment.mask:  # not even the first request fits: nothing to train on, but a sample to report
            segment.tokens = prompt[: self._max_tokens]
            segment.prompt_length = len(segment.tokens)
        return full

    def _broken(self, joined: Joined, prompt: list[int]) -> SlimeError:
        return SlimeError(
            f"turn {self.turns + 1} does not continue what was said: its request ({len(prompt)} tokens) differs from "
            f"token {joined.shared} on",
            "the chat template tells earlier turns differently (drops thinking, trims white space): "
            "rollout.on_prefix_break = segment trains on the parts",
        )


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common prefix. By halving, with the comparisons of lists, which are fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _check_turn(
    prompt_ids: Sequence[int], output_ids: Sequence[int], log_probs: Sequence[float], finish_reason: str
) -> None:
    if not prompt_ids:
        raise DataError("a turn has no prompt token", "begin the prompt with a start token")
    if len(log_probs) != len(output_ids):
        raise DataError(
            f"a turn has {len(output_ids)} tokens and {len(log_probs)} log-probs", "ask the engine with return_logprob"
        )
    if finish_reason not in FINISHED:
        raise DataError(f"a turn ended with {finish_reason!r}", f"known: {', '.join(FINISHED)}")

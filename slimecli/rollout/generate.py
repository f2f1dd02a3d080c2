"""One group: ask the engine, score the answers. A failed answer is marked and counted; it never ends the step."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimecli.engines.seats import EnginesLostError
from slimecli.engines.streaming import going_on, stream_of
from slimecli.errors import DataError, SlimeError
from slimecli.protocols import RolloutEngine
from slimecli.rollout.executions import rewarded, share_rewards
from slimecli.rollout.teacher import Teacher
from slimecli.types import Group, Sample, SampleStatus

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Everything needed to turn pending samples into scored ones."""

    engine: RolloutEngine
    reward: Callable[..., Any]
    """async (args, sample or samples) -> score or scores"""
    args: Any
    """what hooks see (slimecli.rollout.args)"""
    timeout_s: float
    group_reward: bool = False
    custom: Callable[..., Any] | None = None
    """async (args, sample, sampling_params) -> Sample or list of them"""
    evaluation: bool = False
    """what custom generate functions are told, if they have a parameter of that name"""
    partial: bool = False
    """an answer that is aborted under way is kept as it is, to be continued; otherwise it has failed"""
    stream: bool = False
    """answers are told while they are said, so that nothing is lost of one that does not end"""
    decode: Callable[[list[int]], str] | None = None
    """text of response tokens, for answers that were said in several pieces"""
    teacher: Teacher | None = None
    """judges finished answers, token by token (on-policy distillation)"""

    async def group(self, group: Group, sampling: Sequence[Mapping[str, Any]]) -> Group:
        """Generate and score one group. An answer that is aborted under way has failed, unless `partial`: then the
        group comes back unscored, to be given here once more.

        Args:
            group: samples of one prompt: pending ones are begun, aborted ones continued, finished ones left alone.
            sampling: [len(group)] sampling parameters, seed included.
        """
        todo = [(s, p) for s, p in zip(group, sampling, strict=True) if s.status in UNFINISHED]
        for sample, params in todo:
            sample.sampling = dict(params)
        if self.custom is None:
            await self._generate_together([s for s, _ in todo])
            done = list(group)
        else:
            finished = await asyncio.gather(*(self._generate_custom(s) for s, _ in todo))
            done = [s for s in group if s.status not in UNFINISHED and s not in [t for t, _ in todo]]
            done += [s for part in finished for s in part]
        if self.partial and any(s.status in UNFINISHED for s in done):
            return done
        for sample in done:
            if sample.status is SampleStatus.ABORTED:
                self._mark_failed(sample, "generation", SlimeError("the engine aborted the answer"))
        await self._score([s for s in done if rewarded(s)])
        share_rewards(done)
        await self._ask_teacher(done)
        return done

    async def _generate_together(self, samples: list[Sample]) -> None:
        for sample in samples:
            if sample.response_length:
                self._continue(sample)
        samples = [s for s in samples if s.status in UNFINISHED]
        if not samples:
            return
        if self.stream:
            prompts = {tuple(s.tokens) for s in samples}
            alike = [[s for s in samples if tuple(s.tokens) == prompt] for prompt in sorted(prompts)]
            await asyncio.gather(*(self._listen(part) for part in alike))
            return
        payload = self._payload(samples)
        try:
            replies = await asyncio.wait_for(self.engine.generate(payload), self.timeout_s)
        except EnginesLostError:
            raise
        except (SlimeError, TimeoutError) as error:
            for sample in samples:
                self._mark_failed(sample, "generation", error)
            return
        for sample, reply in zip(samples, replies, strict=True):
            self._append(sample, reply)

    @staticmethod
    def _payload(samples: list[Sample]) -> dict[str, Any]:
        return {
            "input_ids": [s.tokens for s in samples],
            "sampling_params": [s.sampling for s in samples],
            "return_logprob": True,
        }

    async def _listen(self, samples: list[Sample]) -> None:
        """Take what the engine says of these answers, which begin alike, until they end or something goes wrong."""
        replies: dict[int, Mapping[str, Any]] = {}
        payload = self._payload(samples)
        payload["sampling_params"] = [going_on(s.sampling, s.response_length) for s in samples]
        trouble: SlimeError | TimeoutError | None = None
        try:
            asked = stream_of(self.engine)(payload, lambda reply: replies.update({reply["index"]: reply}))
            await asyncio.wait_for(asked, self.timeout_s)
        except EnginesLostError:
            raise
        except (SlimeError, TimeoutError) as error:
            trouble = error
        for i, sample in enumerate(samples):
            reply = replies.get(i)
            if reply is not None:
                self._append(sample, reply)
            has_ended = reply is not None and reply["meta_info"]["finish_reason"]
            has_grown = reply is not None and reply["output_ids"]  # without that there is no end to continuing it
            if trouble is not None and not has_ended and not (self.partial and has_grown):
                self._mark_failed(sample, "generation", trouble)

    def _append(self, sample: Sample, reply: Mapping[str, Any]) -> None:
        in_pieces = sample.response_length > 0 or reply.get("pieces", 1) > 1
        append_reply(sample, reply)
        if in_pieces and self.decode is not None:  # a character may lie across the cut
            sample.response = self.decode(sample.tokens[sample.prompt_length :])

    @staticmethod
    def _continue(sample: Sample) -> None:
        """What is left of the token budget; without any the answer is over."""
        left = sample.sampling["max_new_tokens"] - sample.response_length
        sample.sampling["max_new_tokens"] = left
        if left <= 0:
            sample.status = SampleStatus.TRUNCATED

    def _told(self, function: Callable[..., Any]) -> dict[str, bool]:
        """`evaluation`, for a generate function that asks for it."""
        return {"evaluation": self.evaluation} if "evaluation" in inspect.signature(function).parameters else {}

    async def _generate_custom(self, sample: Sample) -> list[Sample]:
        assert self.custom is not None
        try:
            work = self.custom(self.args, sample, dict(sample.sampling), **self._told(self.custom))
            results = self._returned(await asyncio.wait_for(work, self.timeout_s))
        except EnginesLostError:
            raise
        except Exception as error:  # a user's hook may raise anything; it is recorded with its type and counted
            self._mark_failed(sample, "custom generate", error)
            return [sample]
        for item in results:
            if item.rollout_id is None:
                item.rollout_id = sample.index
        return results

    @staticmethod
    def _returned(result: Any) -> list[Sample]:
        """The samples that a generate function returned; raises DataError where they cannot be used."""
        found = result if isinstance(result, list) else [result]
        if not found:
            raise DataError("it returned no sample", "return the sample, or a list of samples")
        for item in found:
            if not isinstance(item, Sample):
                raise DataError(f"it returned a {type(item).__name__}", "return the sample, or a list of samples")
            if item.status is SampleStatus.PENDING:  # to be continued is `aborted`; this would begin again without end
                raise DataError(
                    "it left the sample pending", "say how it ended: sample.status = SampleStatus.COMPLETED"
                )
            if item.status is not SampleStatus.FAILED:
                item.check(scored=False)
        return found

    async def _score(self, group: Group) -> None:
        todo = [s for s in group if s.reward is None and s.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)]
        if self.group_reward and todo:
            await self._score_together(todo)
            return
        each = getattr(self.reward, "each", None)
        if each is not None:
            scores = await each(self.args, todo)
        else:
            scores = await asyncio.gather(*(self._ask_one(s) for s in todo))
        for sample, score in zip(todo, scores, strict=True):
            if isinstance(score, SlimeError):
                self._mark_failed(sample, "reward", score)
            else:
                sample.reward = score

    async def _ask_teacher(self, group: Group) -> None:
        """Its log-probs of every answer that will be trained on."""
        judged = [s for s in group if self.teacher is not None and s.status is not SampleStatus.FAILED]
        if self.teacher is None or not judged:
            return
        for sample, error in zip(judged, await self.teacher.judge(judged), strict=True):
            if error is not None:
                self._mark_failed(sample, "teacher", error)

    async def _score_together(self, todo: list[Sample]) -> None:
        scores = await self._ask_one(todo)
        if not isinstance(scores, SlimeError) and len(scores) != len(todo):
            scores = SlimeError(f"the group reward gave {len(scores)} scores for {len(todo)} samples")
        for i, sample in enumerate(todo):
            if isinstance(scores, SlimeError):
                self._mark_failed(sample, "reward", scores)
            else:
                sample.reward = scores[i]

    async def _ask_one(self, subject: Any) -> Any:
        """The score (or scores), or the SlimeError instead of it."""
        try:
            result = self.reward(self.args, subject)
            return await result if inspect.isawaitable(result) else result
        except SlimeError as error:
            return error

    def _mark_failed(self, sample: Sample, where: str, error: BaseException) -> None:
        sample.status = SampleStatus.FAILED
        if isinstance(error, SlimeError):  # says what is wrong by itself; how to mend it stands in the log once
            reason = error.what
        else:
            reason = f"{type(error).__name__}: {str(error) or f'no answer within {self.timeout_s:.0f} s'}"
        sample.metadata = {**sample.metadata, "failure": f"{where}: {reason}"}


def failure(sample: Sample) -> str:
    """Why a sample failed."""
    return str(sample.metadata.get("failure") or "the generate function gave it the status `failed`")


UNFINISHED = (SampleStatus.PENDING, SampleStatus.ABORTED)


def append_reply(sample: Sample, reply: Mapping[str, Any]) -> None:
    """Add one `/generate` reply to a sample. Token ids come from the reply; text is never re-tokenised."""
    meta = reply["meta_info"]
    triples = meta["output_token_logprobs"]
    ids = [t[1] for t in triples]
    if list(reply["output_ids"]) != ids:
        raise SlimeError("the engine's output_ids differ from its output_token_logprobs", "report the engine's version")
    sample.tokens = [*sample.tokens, *ids]
    sample.response += reply["text"]
    begin = sample.response_length
    sample.response_length += len(ids)
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *(min(t[0], 0.0) for t in triples)]
    if sample.loss_mask is not None:
        sample.loss_mask = [*sample.loss_mask, *([1] * len(ids))]
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version", "")}]
    for span in spans:
        version, start, end = str(span["version"]), span.get("start", 0), span.get("end", len(ids))
        if end > start:
            sample.version_spans.append([version, begin + start, begin + end])
            if version not in sample.weight_versions:
                sample.weight_versions.append(version)
    reason = meta["finish_reason"]
    sample.status = _STATUS[reason["type"]] if reason else SampleStatus.ABORTED

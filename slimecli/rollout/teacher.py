"""A teacher behind a server: its log-probs of finished answers, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine
from slimecli.types import Sample

CONCURRENCY = 32
"""answers that are being judged at a time"""


class Teacher:
    """Asks an engine that holds the teacher what it would have given each token of an answer.

    Args:
        engine: speaks SGLang's /generate and has the policy's tokenizer.
        timeout_s: deadline of one answer.
    """

    def __init__(self, engine: RolloutEngine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def judge(self, samples: Sequence[Sample]) -> list[SlimeError | None]:
        """Set teacher_log_probs where there are none; per sample what went wrong, or None."""
        return list(await asyncio.gather(*(self._one(s) for s in samples)))

    async def _one(self, sample: Sample) -> SlimeError | None:
        if sample.teacher_log_probs is not None:
            return None
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        try:
            async with self._slots:
                reply = await asyncio.wait_for(self._engine.generate(payload), self._timeout_s)
            sample.teacher_log_probs = response_log_probs(sample, reply)
        except TimeoutError:
            return SlimeError(f"the teacher did not answer within {self._timeout_s:g} s")
        except SlimeError as error:
            return error
        return None

    async def close(self) -> None:
        """Close the connection; the server goes on."""
        await self._engine.close()


def response_log_probs(sample: Sample, reply: Any) -> list[float]:
    """[response_length] log-probs of the answer's tokens from a reply to all tokens of a sample.

    `input_token_logprobs` holds [log-prob, token id, ...] per token, None as log-prob of the first.
    """
    told = reply["meta_info"].get("input_token_logprobs") or []
    if [entry[1] for entry in told] != sample.tokens:
        raise SlimeError(
            f"the teacher answered for {len(told)} tokens, or for others than the {len(sample.tokens)} it was sent",
            "see that its server speaks SGLang's /generate with logprob_start_len",
        )
    return [min(entry[0], 0.0) for entry in told[sample.prompt_length :]] if sample.response_length else []

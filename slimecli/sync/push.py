"""The driver's half of a weight sync: have every engine take the staged weights, and believe none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine
from slimecli.sync import shared_memory
from slimecli.sync.stage import StagedWeights
from slimecli.types import WeightReceipt


async def push(
    engine_or_engines: RolloutEngine | Sequence[RolloutEngine], staged: StagedWeights, timeout_s: float
) -> list[WeightReceipt]:
    """Update all engines at the same time; one receipt each, compared with what was staged.

    Raises SlimeError naming every engine that was late, failed, or holds something else.
    """
    engines = list(engine_or_engines) if isinstance(engine_or_engines, Sequence) else [engine_or_engines]
    if not engines:
        raise SlimeError("no engine to push weights to", "set engine.replicas or engine.urls")
    if staged.update.manifest is not None:
        shared_memory.release_at_exit(staged.update.manifest)
    if staged.update.kind == "distributed":
        from slimecli.sync.distributed import push as push_group

        answers = await push_group(engines, staged, timeout_s)
    else:
        calls = [asyncio.wait_for(engine.update_weights(staged.update), timeout_s) for engine in engines]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    problems = [
        f"{name_of(i, engine)}: {trouble}"
        for i, (engine, answer) in enumerate(zip(engines, answers, strict=True))
        if (trouble := _trouble(answer, staged, timeout_s))
    ]
    if problems:
        raise SlimeError(
            f"weight sync to version {staged.update.version} failed: " + "; ".join(problems),
            "the engine's log has more; a resume continues from the last checkpoint",
        )
    return [answer for answer in answers if isinstance(answer, WeightReceipt)]


def name_of(index: int, engine: RolloutEngine) -> str:
    """How messages call an engine: its number, and its address if it has one."""
    url = getattr(engine, "url", None)
    return f"engine {index} at {url}" if url else f"engine {index}"


def _trouble(answer: WeightReceipt | BaseException, staged: StagedWeights, timeout_s: float) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if isinstance(answer, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(answer, SlimeError):
        return answer.what
    if isinstance(answer, BaseException):
        raise answer
    wrong = []
    if answer.version != staged.update.version:
        wrong.append(f"holds version {answer.version}, not {staged.update.version}")
    if answer.fingerprint != staged.fingerprint:
        wrong.append(f"weights have fingerprint {answer.fingerprint}, the trainer's have {staged.fingerprint}")
    return " and ".join(wrong)

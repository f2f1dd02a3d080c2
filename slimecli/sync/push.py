"""The driver's half of a weight sync: have every engine take the staged weights, and believe none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slimecli.engines.http_errors import EngineUnreachableError
from slimecli.errors import SlimeError
from slimecli.protocols import RolloutEngine, Running
from slimecli.sync import shared_memory
from slimecli.sync.stage import StagedWeights
from slimecli.types import WeightReceipt


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a sync on one engine."""

    index: int
    """its place among the engines that were pushed to"""
    name: str
    """how messages call it"""
    receipt: WeightReceipt | None
    """what it answered; None: nothing"""
    trouble: str
    """why it must not be used; empty: it holds what was staged"""
    is_lost: bool = False
    """it is dead or silent, as opposed to one that says no, or holds something else"""


async def push(
    engine_or_engines: RolloutEngine | Sequence[RolloutEngine],
    staged: StagedWeights,
    timeout_s: float,
    *,
    running: Running | None = None,
) -> list[WeightReceipt]:
    """Update all engines at the same time; one receipt each, compared with what was staged.

    Raises SlimeError naming every engine that was late, failed, or holds something else, and then which weights.
    """
    engines = list(engine_or_engines) if isinstance(engine_or_engines, Sequence) else [engine_or_engines]
    if not engines:
        raise SlimeError("no engine to push weights to", "set engine.replicas or engine.urls")
    outcomes = await push_each(engines, staged, timeout_s, running=running)
    if any(o.trouble for o in outcomes):
        raise sync_error(staged, outcomes)
    return [o.receipt for o in outcomes if o.receipt is not None]


def sync_error(staged: StagedWeights, outcomes: Sequence[Outcome]) -> SlimeError:
    """Names every engine that does not hold what was staged."""
    problems = "; ".join(f"{o.name}: {o.trouble}" for o in outcomes if o.trouble)
    return SlimeError(
        f"weight sync to version {staged.update.version} failed: {problems}",
        "the engine's log has more; a resume continues from the last checkpoint",
    )


async def deliver(
    engine: RolloutEngine, staged: StagedWeights, timeout_s: float, *, running: Running | None = None
) -> list[WeightReceipt]:
    """`push` to one engine, or to all of a pool."""
    return await push(getattr(engine, "engines", [engine]), staged, timeout_s, running=running)


async def push_each(
    engines: Sequence[RolloutEngine], staged: StagedWeights, timeout_s: float, *, running: Running | None = None
) -> list[Outcome]:
    """`push` for who decides by himself what becomes of an engine that failed: one outcome each, nothing is raised.

    The same staged weights may be pushed again, to an engine that was replaced, until the next version is staged; kind
    `distributed` must be staged again.

    Args:
        running: what becomes of requests that run; None: what the staged update says.
    """
    if staged.update.manifest is not None:
        shared_memory.release_at_exit(staged.update.manifest)
    if running is not None:
        asked = replace(staged.update, in_flight=running == "continue", abort_running=running == "abort")
        staged = replace(staged, update=asked)
    asked = staged.update
    if asked.kind == "distributed":
        from slimecli.sync.distributed import push as push_group

        answers = await push_group(engines, staged, timeout_s)
    else:
        calls = [asyncio.wait_for(engine.update_weights(asked), timeout_s) for engine in engines]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    outcomes = []
    for i, (engine, answer) in enumerate(zip(engines, answers, strict=True)):
        trouble = _trouble(answer, staged, timeout_s)
        if isinstance(answer, WeightReceipt) and answer.fingerprint not in ("", staged.fingerprint):
            trouble += await _differences(engine, staged, timeout_s)
        receipt = answer if isinstance(answer, WeightReceipt) else None
        lost = isinstance(answer, TimeoutError | EngineUnreachableError)
        outcomes.append(Outcome(index=i, name=name_of(i, engine), receipt=receipt, trouble=trouble, is_lost=lost))
    return outcomes


async def _differences(engine: RolloutEngine, staged: StagedWeights, timeout_s: float) -> str:
    """The weights that an engine holds otherwise, by name; empty if it cannot tell."""
    ask = getattr(engine, "digests", None)
    if ask is None or not staged.digests:
        return ""
    try:
        held: dict[str, str] = await asyncio.wait_for(ask(), timeout_s)
    except (SlimeError, TimeoutError):
        return ""  # that the weights differ is told already
    wrong = sorted(n for n in staged.digests.keys() | held.keys() if staged.digests.get(n) != held.get(n))
    if not held or not wrong:
        return ""
    return f"; {len(wrong)} of {len(staged.digests)} weights differ: {', '.join(wrong[:3])}"


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
    if answer.fingerprint not in ("", staged.fingerprint):
        wrong.append(f"weights have fingerprint {answer.fingerprint}, the trainer's have {staged.fingerprint}")
    return " and ".join(wrong)

"""Several engines as one, of which any may die: its requests go to others while it is started anew."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimecli.engines import seats
from slimecli.engines.http import HttpEngine
from slimecli.engines.http_errors import EngineUnreachableError
from slimecli.engines.pool import Ask, EnginePool
from slimecli.engines.seats import EnginesLostError, GivenUpError, Policy, Seat
from slimecli.engines.streaming import Tell
from slimecli.errors import SlimeError
from slimecli.protocols import Running
from slimecli.types import WeightReceipt

if TYPE_CHECKING:
    from slimecli.sync.stage import StagedWeights

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""runs a coroutine to its end on the loop that drives the engines"""
POLL_S = 0.05


class SupervisedPool(EnginePool):
    """Engines behind HTTP, each of which is replaced when it dies.

    A request in flight on a dead or silent engine is sent to another one: with a seed, the answer is the same. The
    engine is started anew in the background, is given the weights that all others have, and takes part again once its
    fingerprint shows that it has them.

    Args:
        respawn: number of an engine -> a new one, ready to answer; called in a thread. Ends what is left of the old.
        log: file in which every event is a line.

    Attributes:
        current: gives the weights that every engine must hold, as often as it is called; None before the first.
        version: theirs; an engine that answers with an older one is not believed. -1 before the first.
        count: called with a name and a value for the metrics.
        router: told of engines that come and go.
    """

    engines: list[HttpEngine]  # type: ignore[assignment]

    def __init__(
        self,
        engines: Sequence[HttpEngine],
        policy: Policy,
        respawn: Callable[[int], HttpEngine],
        *,
        log: Path | None = None,
    ) -> None:
        super().__init__(engines)
        self.policy = policy
        self.current: Callable[[], StagedWeights] | None = None
        self.count: Callable[[str, float], None] = lambda name, value: None
        self.router: seats.Front | None = None
        self.seats = [Seat(i) for i in range(len(engines))]
        self._respawn = respawn
        self._log = log
        self._weights = threading.Lock()
        """held while weights change: a new engine must not load what is being written"""
        self.version = -1
        self._changing = False
        self._asleep: set[str] = set()
        self._fatal: EnginesLostError | None = None
        self._closing = False

    # -- requests ----------------------------------------------------------------------------------------------------

    def _usable(self) -> list[int]:
        up = [s.number for s in self.seats if s.state == "up"]
        return up or [s.number for s in self.seats]  # where none is, `_ask` waits for one

    async def generate(self, payload: Mapping[str, Any]) -> Any:
        """Route, or split and join; waits where no engine lives but one is being started."""
        await self._one_is_up()
        return await super().generate(payload)

    async def generate_stream(self, payload: Mapping[str, Any], tell: Tell) -> None:
        """Answers go on at another engine, from their last token, where one is lost under them."""
        await self._one_is_up()
        await super().generate_stream(payload, tell)

    async def _ask(self, index: int, ask: Ask, count: int) -> Any:
        told: list[str] = []
        for _ in range(self.policy.retries + 1):
            if self.seats[index].state != "up":
                await self._one_is_up()
                index = self._pick(None)
            seat, version = self.seats[index], self.version
            self._load[index] += count
            try:
                return seats.check_version(await self._guarded(seat, self._call(index, ask)), version)
            except seats.StaleError as error:
                told.append(f"{self._name(index)}: {error}")
                if seat.state == "up":
                    self._lose(seat, str(error))
            except GivenUpError:
                told.append(f"{self._name(index)}: {seat.why}")
            except EngineUnreachableError as error:
                told.append(error.what)
                await self._suspect(seat)
            finally:
                self._load[index] -= count
        raise EngineUnreachableError(
            f"a request lost its engine {len(told)} times: {'; '.join(told)}",
            "if one prompt ends every engine, leave it out; rollout.max_retries sets the number of tries",
        )

    async def _guarded(self, seat: Seat, asked: Coroutine[Any, Any, Any]) -> Any:
        """Await an answer; an engine that is given up meanwhile ends the wait."""
        work = asyncio.ensure_future(asked)
        seat.running.add(work)
        if seat.watch is None or seat.watch.done():
            seat.watch = asyncio.ensure_future(self._watch(seat))
        try:
            await asyncio.wait([work])
        finally:
            work.cancel()  # of no effect on one that is done
            seat.running.discard(work)
        if work.cancelled():
            self._raise_if_over()
            raise GivenUpError
        return work.result()

    async def _one_is_up(self) -> None:
        """Wait until an engine can be asked. Raises EnginesLostError where none will come."""
        end = time.monotonic() + self.policy.start_timeout_s * (self.policy.max_restarts + 1)
        while True:
            self._raise_if_over()
            if any(s.state == "up" for s in self.seats):
                return
            if time.monotonic() > end:
                raise self._all_lost("no engine came up in time")
            await asyncio.sleep(POLL_S)

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if all(s.state == "out" for s in self.seats):
            raise self._all_lost("no engine is left")

    def _all_lost(self, what: str) -> EnginesLostError:
        told = "; ".join(f"{self._name(s.number)} ({s.why})" for s in self.seats if s.state != "up")
        return EnginesLostError(f"{what}: {told}", "see their logs; continue with `slime run --resume`")

    # -- supervision -------------------------------------------------------------------------------------------------

    async def _watch(self, seat: Seat) -> None:
        """Look at an engine as long as it has requests in flight; give it up when it is silent for too long.

        Silence is counted in looks, not by the clock: the loop may stand still between two steps of a run.
        """
        silent = 0.0
        while seat.running:
            await asyncio.sleep(self.policy.interval_s)
            if self._fatal is not None:  # `stop` cannot end them: it comes from another thread
                for task in list(seat.running):
                    task.cancel()
                return
            if self._changing or seat.state != "up" or not seat.running:
                silent = 0.0
                continue
            begin = time.monotonic()
            why = await self._trouble(seat, self.policy.interval_s)
            spent = self.policy.interval_s + min(time.monotonic() - begin, self.policy.interval_s)
            silent = silent + spent if why else 0.0
            if silent >= self.policy.deadline_s and seat.state == "up":
                self._lose(seat, f"no answer to health checks for {silent:.0f} s")

    async def _trouble(self, seat: Seat, timeout_s: float) -> str:
        """What is wrong with an engine; empty if it answers its health check."""
        try:
            await asyncio.wait_for(self.engines[seat.number].health(), timeout_s)
        except TimeoutError:
            return f"no answer to a health check within {timeout_s:g} s"
        except EngineUnreachableError as error:
            what = f"no connection to the engine at {self.engines[seat.number].url} while answering its health check"
            why = error.what.replace(what, "no connection")
            if seat.state == "up":
                self._lose(seat, why)
            return why
        except SlimeError as error:
            return error.what
        return ""

    async def _suspect(self, seat: Seat) -> None:
        """A connection broke: is the engine dead, or was it the network? `_trouble` gives up one that is not there."""
        if seat.state == "up":
            await self._trouble(seat, self.policy.interval_s)

    def _lose(self, seat: Seat, why: str) -> None:
        """Give an engine up: its requests go elsewhere, and it is started anew or the run ends."""
        seat.state, seat.why = "down", why
        self.count("engine/lost", 1.0)
        if not self.policy.restart:
            self._fatal = EnginesLostError(
                f"{self._name(seat.number)} is lost: {why}",
                "continue with `slime run --resume`; engine.on_failure = 'restart' would have gone on without it",
            )
        for other in self.seats if self._fatal else [seat]:
            for task in list(other.running):
                task.cancel()
        if self._fatal is None and not self._asleep:
            self._begin_restart(seat)

    def _begin_restart(self, seat: Seat) -> None:
        seat.thread = threading.Thread(target=self._revive, args=(seat,), name="slime-engine-restart", daemon=True)
        seat.thread.start()

    def _revive(self, seat: Seat) -> None:
        """`_restart`; whatever goes wrong with it, nobody waits for this engine any more."""
        try:
            self._restart(seat)
        except BaseException as error:
            seat.state, seat.why = "out", f"{type(error).__name__}: {error}"
            if not self._closing:  # at the end of a run the cluster goes while an engine is being started
                raise

    def _restart(self, seat: Seat) -> None:
        """Start an engine anew, as often as allowed."""
        begin, name, why = time.monotonic(), self._name(seat.number), seat.why
        old = self.engines[seat.number]
        seats.tell_router(self.router, self._log, gone=old.url)
        while seat.restarts < self.policy.max_restarts and not self._closing:
            seat.restarts += 1
            try:
                engine = self._respawn(seat.number)
                held = self._seat_again(seat, engine)
            except SlimeError as error:
                seat.why = error.what
                continue
            seconds = time.monotonic() - begin
            if seat.state == "up":
                seats.tell_router(self.router, self._log, new=engine.url)
            seats.tell(self._log, f"{name} died ({why}): restarted in {seconds:.1f} s at {engine.url}, {held}")
            self.count("engine/restarts", 1.0)
            self.count("engine/restart_seconds", seconds)
            asyncio.run(old.close())
            return
        seat.state = "out"
        if not self._closing:
            left = sum(s.state == "up" for s in self.seats)
            told = f"not restarted (engine.max_restarts = {self.policy.max_restarts}); {left} engines are left"
            seats.tell(self._log, f"{name} died ({why}), {told}: {seat.why}")

    def _seat_again(self, seat: Seat, engine: HttpEngine) -> str:
        """Give a new engine the current weights, and have it take part; what it holds."""
        with self._weights:
            held, is_stale = "holds the weights it started with", False
            if self.current is not None:
                try:
                    held = asyncio.run(seats.bring_up_to_date(engine, self.current(), self.policy.sync_timeout_s))
                except SlimeError as error:
                    asyncio.run(engine.health())
                    held, is_stale = f"waits for the next weights ({error.what})", True
            self.engines[seat.number] = engine
            seat.state = "stale" if is_stale else "up"
        return held

    # -- weights -----------------------------------------------------------------------------------------------------

    def publish(
        self,
        stage: Callable[[], StagedWeights],
        again: Callable[[StagedWeights], StagedWeights],
        run: Run,
        *,
        running: Running = "finish",
    ) -> tuple[StagedWeights, list[WeightReceipt], float]:
        """Stage weights and have every engine take them; what was staged, one receipt each, seconds without staging.

        An engine that is dead, or silent for too long, is given up and gets these weights when it is there again. One
        that refuses them, or holds something else afterwards, is an error: no engine goes on with other weights.

        Args:
            again: the same weights in a form that one engine can take by itself, at any time until the next version.
            run: runs a coroutine on the loop that drives the engines.
            running: what becomes of requests that run.
        """
        for _ in range(len(self.seats) * (self.policy.max_restarts + 1) + 1):
            run(self._look_at_all())
            run(self._one_is_there())
            with self._weights:
                self._changing = True
                try:
                    staged = stage()
                    begin = time.perf_counter()
                    is_done, receipts = run(self._push(staged, running))
                    if is_done:
                        self.current, self.version = functools.partial(again, staged), staged.update.version
                        self._take_along(run)
                finally:
                    self._changing = False
            self._raise_if_over()
            if is_done and any(s.state == "up" for s in self.seats):
                return staged, receipts, time.perf_counter() - begin
        raise self._all_lost("the weights reached no engine")

    async def _look_at_all(self) -> None:
        """Find out who is dead before weights are staged, which may take long, and in some ways needs all of them."""
        there = [s for s in self.seats if s.state in ("up", "stale")]
        troubles = await asyncio.gather(*(self._trouble(s, self.policy.deadline_s) for s in there))
        for seat, why in zip(there, troubles, strict=True):
            if why and seat.state in ("up", "stale"):
                self._lose(seat, why)
        self._raise_if_over()

    async def _one_is_there(self) -> None:
        """Wait until an engine can take weights."""
        if not any(s.state == "stale" for s in self.seats):
            await self._one_is_up()

    async def _push(self, staged: StagedWeights, running: Running) -> tuple[bool, list[WeightReceipt]]:
        """To all engines that take part. False: it must be done once more, without those that were lost."""
        from slimecli.sync.push import push_each, sync_error

        asked = [s for s in self.seats if s.state == "up"]
        engines = [self.engines[s.number] for s in asked]
        outcomes = await push_each(engines, staged, self.policy.sync_timeout_s, running=running) if engines else []
        lost = [(s, o) for s, o in zip(asked, outcomes, strict=True) if o.is_lost]
        if any(o.trouble for o in outcomes) and not lost:
            raise sync_error(staged, outcomes)
        # in a process group all wait for all: what the others say beside a dead engine may be a consequence, or that
        # they were late
        answers = [s for s, _ in lost if not await self._trouble(s, self.policy.interval_s)]
        is_late = len(answers) == len(lost)
        for seat, outcome in lost:
            if seat.state == "up" and (is_late or seat not in answers):
                self._lose(seat, outcome.trouble)
        is_done = not any(o.trouble for s, o in zip(asked, outcomes, strict=True) if s.state == "up")
        return is_done, [o.receipt for o in outcomes if o.receipt is not None]

    def _take_along(self, run: Run) -> None:
        """Engines that were started anew and had to wait for weights."""
        assert self.current is not None
        for seat in self.seats:
            if seat.state == "stale":
                try:
                    run(seats.bring_up_to_date(self.engines[seat.number], self.current(), self.policy.sync_timeout_s))
                except SlimeError as error:
                    self._lose(seat, error.what)
                    continue
                seat.state = "up"
                seats.tell_router(self.router, self._log, new=self.engines[seat.number].url)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _excuses(self, index: int, error: BaseException) -> bool:
        """Control calls go to who lives; an engine that is found dead by one is given up."""
        if not isinstance(error, EngineUnreachableError):
            return False
        if self.seats[index].state == "up":
            self._lose(self.seats[index], error.what)
        return True

    def _living(self) -> list[int]:
        return [s.number for s in self.seats if s.state in ("up", "stale")] or super()._living()

    async def sleep(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Every engine, also those that are just being started. One that dies now is started at the next wake."""
        while any(s.is_starting for s in self.seats):
            await asyncio.sleep(POLL_S)
        self._asleep |= set(tags)
        await super().sleep(tags)

    async def wake(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Every engine."""
        await super().wake(tags)
        self._asleep -= set(tags)
        if not self._asleep:
            for seat in self.seats:
                if seat.state == "down" and not seat.is_starting:
                    self._begin_restart(seat)

    @property
    def address(self) -> str:
        """Where those go who speak HTTP themselves: the router, or the first engine."""
        return self.router.url if self.router is not None else self.engines[0].url

    def stop(self, error: SlimeError) -> None:
        """Nothing can be generated any more, for a reason that is not an engine's. May be called from any thread."""
        self._fatal = EnginesLostError(error.what, error.fix)

    async def close(self) -> None:
        """The router and every client; restarts that are under way are not waited for. Idempotent."""
        self._closing = True
        if self.router is not None:
            await asyncio.to_thread(self.router.close)
        for engine in self.engines:
            with contextlib.suppress(SlimeError):
                await engine.close()

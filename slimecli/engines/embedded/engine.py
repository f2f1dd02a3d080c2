"""The embedded engine as a RolloutEngine in this process; the HTTP server is a front of the same object."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from slimecli.engines.embedded import config as folder_config
from slimecli.engines.embedded import weights
from slimecli.engines.embedded.loading import build_model, prediction_weights
from slimecli.engines.embedded.request import Ask, Limits, Request, parse_generate
from slimecli.engines.embedded.scheduler import Scheduler, stamp
from slimecli.engines.embedded.text import TextCodec
from slimecli.engines.embedded.updates import EngineWeights
from slimecli.engines.embedded.worker import Gather, Worker, both, numbered
from slimecli.errors import SlimeError
from slimecli.protocols import WeightUpdate
from slimecli.types import WeightReceipt

TAGS = ("weights", "kv_cache", "cuda_graph")
"""what sleep and wake take; cuda_graph is SGLang's and holds nothing here"""


class EmbeddedEngine:
    """Generates with an own model over slots, on one thread.

    Args:
        model_dir: HF folder: config.json, safetensors, tokenizer.
        slots: answers decoded at the same time.
        max_context: prompt plus answer (tokens).
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        threads: CPU threads for matrix products.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        slots: int = 64,
        max_context: int,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 1,
    ) -> None:
        self.model_dir = Path(model_dir)
        config = folder_config.read_config(self.model_dir)
        where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        if where.type == "cpu":
            torch.set_num_threads(threads)
        self.config = config
        self.model = build_model(self.model_dir, config, slots, max_context, dtype, where)
        self.codec = TextCodec(self.model_dir, self.model.vocab)
        ends = folder_config.end_tokens(self.model_dir, config, self.codec.tokenizer)
        self.limits = Limits(vocab=self.model.vocab, max_context=max_context, end_ids=ends)
        self._book = weights.WeightBook(self.model, prediction_weights(self.model_dir, config, self.model.dtype))
        stored = weights.FolderWeights(self.model_dir)
        with torch.inference_mode():
            self._book.load(stored.headers, stored.tensors())
        self._worker = Worker(Scheduler(self.model, self.codec, slots, max_context))
        self._asleep: set[str] = set()
        self.weights = EngineWeights(self.model, self._worker, self._book, self._asleep)
        self._closed = False

    @property
    def _scheduler(self) -> Scheduler:
        return self._worker.scheduler

    async def _call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._worker.call(work))

    # -- generating --------------------------------------------------------------------------------------------------

    async def generate(self, payload: Mapping[str, Any]) -> Any:
        """SGLang's /generate; a reply, or a list of them for list input or n > 1."""
        ask = parse_generate(payload, self.limits, self.codec.encode)
        gather = Gather(len(ask.prompts))
        self._submit(ask, gather, None)
        found = await self._wait(ask, gather)
        return found[0] if ask.single else found

    async def stream(self, payload: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The reply so far after each token, with `index` for the answer's number; the last one has finish_reason."""
        ask = parse_generate(payload, self.limits, self.codec.encode)
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gather = Gather(len(ask.prompts))

        def tell(item: dict[str, Any] | None) -> None:
            # the loop may be gone when a caller left early; its request is aborted below
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        gather.future.add_done_callback(lambda _: tell(None))
        self._submit(ask, gather, tell)
        try:
            while (item := await inbox.get()) is not None:
                yield item
            gather.future.result()
        finally:
            if not gather.future.done():
                self._forget(ask)

    async def generate_stream(self, payload: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
        """`stream`, told to a function; returns when all answers have ended."""
        async for item in self.stream(payload):
            tell(item)

    def _submit(self, ask: Ask, gather: Gather, tell: Callable[[dict[str, Any]], None] | None) -> None:
        arrived = stamp()
        requests = []
        for i, prompt in enumerate(ask.prompts):
            finish = gather.finisher(i)
            request = Request(
                rid=ask.rids[i],
                family=ask.families[i],
                prompt=prompt,
                sampling=ask.samplings[i],
                finish=finish,
                fail=gather.fail,
                return_logprob=ask.return_logprob[i],
                logprob_start=ask.logprob_start[i],
                top_logprobs=ask.top_logprobs[i],
                arrived=arrived,
            )
            if tell is not None:
                request.on_tokens = numbered(tell, i)
                request.finish = both(numbered(tell, i), finish)
            requests.append(request)

        def enter() -> None:
            if self._book.trouble or self._asleep:
                error = SlimeError(f"the engine cannot generate: {self._book.trouble or self._slumber()}", _PUSH)
                for request in requests:
                    request.fail(error)
                return
            try:
                for stops in {s.stop for s in ask.samplings if s.stop}:
                    self.codec.stop_mask(stops)
            except Exception as error:  # whatever it is, who waits must hear of it
                gather.fail(error)
                return
            self._scheduler.submit(requests)

        self._worker.call(enter)

    def _slumber(self) -> str:
        return f"{', '.join(sorted(self._asleep))} asleep"

    async def _wait(self, ask: Ask, gather: Gather) -> list[dict[str, Any]]:
        try:
            return await asyncio.wrap_future(gather.future)
        except asyncio.CancelledError:
            self._forget(ask)
            raise

    def _forget(self, ask: Ask) -> None:
        """Nobody waits for these answers any more."""
        if not self._closed:
            self._worker.call(lambda: [self._scheduler.abort(rid) for rid in ask.rids])

    async def abort(self, rid: str | None = None) -> None:
        """Stop one request, or all."""
        await self._call(lambda: self._scheduler.abort(rid))

    async def pause(self, mode: str = "abort") -> None:
        """Stop stepping. abort: end everything; retract: caches are given up; in_place: everything stays."""
        if mode not in ("abort", "retract", "in_place"):
            raise SlimeError(f"unknown pause mode {mode!r}", "use abort, retract or in_place")

        def work() -> None:
            if mode == "abort":
                self._scheduler.abort()
            elif mode == "retract":
                self._scheduler.retract()
            self._worker.hold.add("pause")

        await self._call(work)

    async def resume(self) -> None:
        """Go on after pause."""
        await self._call(lambda: self._worker.hold.discard("pause"))

    async def flush(self) -> bool:
        """Forget cached prompts; False while requests run."""

        def work() -> bool:
            if self._scheduler.busy:
                return False
            self._scheduler.prefixes.clear()
            return True

        return bool(await self._call(work))

    # -- weights (embedded.updates) ----------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Load weights; what becomes of running requests is the update's to say."""
        return await self.weights.update(update)

    async def join_group(self, payload: Mapping[str, Any]) -> None:
        """Enter a weight-update process group."""
        await self.weights.join_group(payload)

    async def leave_group(self, name: str) -> None:
        """Leave it."""
        await self.weights.leave_group(name)

    async def fingerprint(self) -> str:
        """Over the engine's own live weights."""
        return await self.weights.fingerprint()

    async def digests(self) -> dict[str, str]:
        """One digest per live weight, to name the one that differs."""
        return await self.weights.digests()

    # -- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Free memory by tag; refused while requests run."""
        _check_tags(tags)

        def work() -> None:
            if self._scheduler.busy:
                raise SlimeError("the engine has requests running", "abort them or wait before sleep")
            self._scheduler.prefixes.clear()
            if "kv_cache" in tags and "kv_cache" not in self._asleep:
                self.model.cache.free()
                self._asleep.add("kv_cache")
            if "weights" in tags and "weights" not in self._asleep:
                self.model.free_weights()
                self._book.forget()
                self._asleep.add("weights")

        await self._call(work)

    async def wake(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Take memory back; after weights, push before generating."""
        _check_tags(tags)

        def work() -> None:
            if "weights" in tags and "weights" in self._asleep:
                self.model.allocate_weights()
                self._asleep.discard("weights")
            if "kv_cache" in tags and "kv_cache" in self._asleep:
                self.model.cache.allocate()
                self._asleep.discard("kv_cache")

        await self._call(work)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What the engine is and does now."""
        s = self._scheduler
        return {
            "model_path": str(self.model_dir),
            "model_type": self.config.get("model_type", ""),
            "device": str(self.model.device),
            "dtype": weights.dtype_name(self.model.dtype),
            "weight_version": s.version,
            "weights_ready": not self._book.trouble,
            "slots": s.slots,
            "max_context": self.limits.max_context,
            "vocab_size": self.model.vocab,
            "running": s.active,
            "waiting": len(s.waiting),
            "paused": sorted(self._worker.hold),
            "asleep": sorted(self._asleep),
            "steps": s.steps,
            "generated_tokens": s.tokens,
            "weight_bytes": self.model.weight_bytes,
            "kv_cache_bytes": self.model.cache.nbytes,
        }

    async def close(self) -> None:
        """End the thread and free everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._worker.close)
        self.weights.close()
        self.model.cache.free()
        self.model.free_weights()


_PUSH = "push weights and wake everything that sleeps, then try again"


def _check_tags(tags: tuple[str, ...]) -> None:
    unknown = sorted(set(tags) - set(TAGS))
    if unknown:
        raise SlimeError(f"unknown memory tag {unknown[0]!r}", f"use {', '.join(TAGS)}")

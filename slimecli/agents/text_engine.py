"""An engine that takes token ids, together with what turns conversations into them and answers back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimecli import files
from slimecli.agents.tool_calls import ToolFormat, tool_format
from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.text import TextCodec
from slimecli.engines.http import HttpEngine
from slimecli.engines.http_errors import EngineRefusedError
from slimecli.protocols import RolloutEngine

if TYPE_CHECKING:
    from slimecli.engines.embedded.engine import EmbeddedEngine

Stream = Callable[[Mapping[str, Any]], AsyncIterator[dict[str, Any]]]


class TextEngine:
    """What the adapters drive: the embedded engine, or any other behind `/generate`.

    Args:
        engine: generates.
        codec: tokenizer and chat template of its model.
        name: what it is called in replies.
        max_context: prompt plus answer (tokens).
        family: model_type; decides how tool calls are written.
        stream: payload -> the reply so far after each token; without one a streamed answer comes at once.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        codec: TextCodec,
        *,
        name: str,
        max_context: int,
        family: str = "",
        stream: Stream | None = None,
    ) -> None:
        self.engine = engine
        self.codec = codec
        self.name = name
        self.max_context = max_context
        self.template = str(getattr(codec.tokenizer, "chat_template", None) or "")
        self.tools: ToolFormat = tool_format(family, self.template)
        self.counts: Counter[str] = Counter()
        """what happened to answers, see Sessions.counts"""
        self._stream = stream

    @property
    def thinks(self) -> bool:
        """Whether the model's answers may begin with thinking that its template knows of."""
        return "</think>" in self.template

    async def generate(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All answers to one request."""
        with callers_fault():
            found = await self.engine.generate(payload)
        return found if isinstance(found, list) else [found]

    async def stream(self, payload: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The replies so far, each with `index`."""
        if self._stream is not None:
            with callers_fault():
                async for item in self._stream(payload):
                    yield item if "index" in item else {**item, "index": 0}
            return
        whole = {k: v for k, v in payload.items() if k != "stream"}
        for index, item in enumerate(await self.generate(whole)):
            yield {**item, "index": index}


def embedded(engine: EmbeddedEngine) -> TextEngine:
    """The embedded engine in this process."""
    return TextEngine(
        engine,
        engine.codec,
        name=str(engine.model_dir),
        max_context=engine.limits.max_context,
        family=str(engine.config.get("model_type", "")),
        stream=engine.stream,
    )


def remote(
    engine: RolloutEngine,
    model_dir: Path,
    *,
    max_context: int,
    stream: Stream | None = None,
) -> TextEngine:
    """Engines elsewhere, driven through a client; the tokenizer comes from an HF folder here.

    Args:
        stream: HttpStream to where `/generate` can be streamed from; without one answers come at once.
    """
    config = files.read_json(model_dir / "config.json")
    text = config.get("text_config") or {}
    codec = TextCodec(model_dir, int(config.get("vocab_size") or text.get("vocab_size") or 0))
    family = str(config.get("model_type", "")).removesuffix("_text")
    return TextEngine(engine, codec, name=str(model_dir), max_context=max_context, family=family, stream=stream)


@contextlib.contextmanager
def callers_fault() -> Iterator[None]:
    """What an engine elsewhere refuses of a payload is the caller's to mend, and told in the engine's words."""
    try:
        yield
    except EngineRefusedError as error:
        if not error.is_callers_fault:
            raise
        raise BadRequest(error.reason) from None


class HttpStream:
    """Server-sent events of `/generate`; where one engine is lost, another one says the rest."""

    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine

    async def __call__(self, payload: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The replies so far. Closing the iterator early makes the engine drop the request."""
        told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        if _can_go_on(payload):
            ask = self._engine.generate_stream(_list_of_one(payload), told.put_nowait)
        else:
            ask = self._engine.stream_once(payload, told.put_nowait)
        work = asyncio.ensure_future(ask)
        work.add_done_callback(lambda _: told.put_nowait({}))
        try:
            while item := await told.get():
                yield item
            await work
        finally:
            work.cancel()


def _list_of_one(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A request for one answer in the form of one for several."""
    params = {k: v for k, v in payload["sampling_params"].items() if k != "n"}
    rid = [payload["rid"]] if payload.get("rid") else None
    return {**payload, "input_ids": [payload["input_ids"]], "sampling_params": [params], "rid": rid}


def _can_go_on(payload: Mapping[str, Any]) -> bool:
    """Whether another engine could say the rest of an answer: one answer to one prompt, without other tokens' odds."""
    params = payload.get("sampling_params")
    if not isinstance(params, Mapping) or not isinstance(params.get("max_new_tokens"), int):
        return False
    ids = payload.get("input_ids")
    single = isinstance(ids, list) and bool(ids) and isinstance(ids[0], int) and params.get("n") in (None, 1)
    return single and not payload.get("top_logprobs_num") and payload.get("logprob_start_len") in (None, -1)

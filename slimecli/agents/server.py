"""The adapters on a loopback port, for agents that are run during a rollout: a base URL and a key is all they get.

async def generate(args, sample, sampling_params):
    async with agent_server(args).session(sample, sampling_params) as session:
        await my_agent(base_url=session.base_url, api_key=session.api_key, task=sample.prompt)
        return session.samples()
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimecli.agents.conversation import Sessions
from slimecli.agents.routes import about_routes, chat_routes
from slimecli.agents.text_engine import TextEngine, embedded, remote
from slimecli.engines import fitting_context
from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import Listener, web_app
from slimecli.errors import SlimeError
from slimecli.rollout.custom import hold_open
from slimecli.types import Sample

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "sampling_seed", "stop_token_ids", "ignore_eos")
"""parameters of a rollout that hold for every turn; those about text would spoil what the agent reads"""


@dataclass(kw_only=True)
class AgentSession:
    """One execution of an agent."""

    url: str
    """Anthropic's base URL, without /v1"""
    api_key: str
    """names the session; the agent sends it as its API key"""
    _found: list[Sample] | None = field(default=None, repr=False)
    _end: Any = field(default=None, repr=False)

    @property
    def base_url(self) -> str:
        """OpenAI's base URL, with /v1."""
        return f"{self.url}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """Environment for agents that read their settings there."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    async def samples(self) -> list[Sample]:
        """What was said, as samples that share a rollout_id. The session is over then.

        Raises SlimeError where the agent never asked the model.
        """
        if self._found is None:
            self._found = await self._end()
        if not self._found:
            raise SlimeError("the agent never asked the model", "see that it uses the session's base URL and key")
        return self._found


class AgentServer:
    """Sessions over an engine, served from a thread of its own.

    Args:
        engine: generates, and knows the chat template.
        max_tokens: longest sequence that is trained on (tokens); 0: no limit.
    """

    def __init__(self, engine: TextEngine, *, max_tokens: int = 0) -> None:
        self.engine = engine
        self.sessions = Sessions(engine, max_tokens=max_tokens, strict=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slime-agents", daemon=True)
        self._thread.start()
        routes = chat_routes(engine, self.sessions, key_is_session=True) + about_routes(engine)
        self._listener = Listener(web_app(routes))
        self.url = asyncio.run_coroutine_threadsafe(self._listener.start(), self._loop).result()

    async def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @contextlib.asynccontextmanager
    async def session(
        self, base: Sample, sampling_params: Mapping[str, Any] | None = None
    ) -> AsyncIterator[AgentSession]:
        """One execution that works on a pending sample; at the end it is forgotten.

        Args:
            base: its index, label and metadata go to every sample of the execution.
            sampling_params: override what the agent asks for; max_new_tokens limits every turn.
        """
        key = f"slime-{uuid.uuid4().hex}"

        async def begin() -> None:
            own = {k: v for k, v in (sampling_params or {}).items() if k in SAMPLING}
            begun = Sample.from_dict(base.to_dict())
            begun.session_id = base.session_id or f"{base.group_index}-{base.index}"  # the key is another in each run
            self.sessions.open(key, base=begun).sampling = own

        async def end() -> list[Sample]:
            return self.sessions.end(key)

        async def drop() -> None:
            self.sessions.drop(key)

        await self._call(begin())
        try:
            yield AgentSession(url=self.url, api_key=key, _end=lambda: self._call(end()))
        finally:
            await self._call(drop())

    def close(self) -> None:
        """Stop serving; the engine stays. Idempotent."""
        if self._loop.is_closed():
            return
        for key in [k for k, server in _servers.items() if server is self]:
            del _servers[key]
        asyncio.run_coroutine_threadsafe(self._listener.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_servers: dict[int, AgentServer] = {}
"""id of the engine -> its server, for the generate functions of this process"""


def agent_server(args: Any) -> AgentServer:
    """The server over the engine of a run, started at the first call.

    Args:
        args: what the custom generate function was given.
    """
    engine, recipe = args.engine, args.recipe
    if engine is None:
        raise SlimeError("args has no engine", "agent_server is for generate functions that `slime run` calls")
    if id(engine) not in _servers:
        if isinstance(engine, EmbeddedEngine):
            text = embedded(engine)
        else:
            folder = Path(args.hf_checkpoint)
            text = remote(engine, folder, max_context=fitting_context(recipe, folder))
        _servers[id(engine)] = AgentServer(text, max_tokens=text.max_context)
        hold_open("agent server", _servers[id(engine)])
    return _servers[id(engine)]

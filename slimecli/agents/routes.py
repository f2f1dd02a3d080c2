"""All routes of the adapters, and those that open and end sessions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from slimecli.agents import anthropic, openai
from slimecli.agents.chat import Chat
from slimecli.agents.conversation import Conversation, NoSession, Sessions
from slimecli.agents.text_engine import TextEngine
from slimecli.agents.wire import asked, check_kinds, session_name
from slimecli.engines.embedded.request import BadRequest
from slimecli.engines.embedded.server import Handler, reply

Route = tuple[str, str, Handler]


def chat_routes(
    engine: TextEngine,
    sessions: Sessions | None = None,
    *,
    sampling: dict[str, Any] | None = None,
    key_is_session: bool = False,
) -> list[Route]:
    """OpenAI's and Anthropic's endpoints; with sessions, also what is said about them.

    Args:
        sampling: parameters that override the caller's.
        key_is_session: the key of a request names its session, for agents whose base URL and key are all one can set.
    """
    chat = Chat(engine, sessions, sampling)
    found = openai.routes(chat, key_is_session=key_is_session) + anthropic.routes(chat, key_is_session=key_is_session)
    return found if sessions is None else found + session_routes(sessions)


def about_routes(engine: TextEngine) -> list[Route]:
    """What clients look up before they begin."""

    async def models(request: web.Request) -> web.Response:
        card = {"id": engine.name, "object": "model", "created": 0, "owned_by": "slime", "root": engine.name}
        return reply({"object": "list", "data": [card | {"max_model_len": engine.max_context}]})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    return [("GET", "/v1/models", models), ("GET", "/health", health)]


def session_routes(sessions: Sessions) -> list[Route]:
    """Open, look at and end sessions; feedback ends one too."""

    async def begin(request: web.Request) -> web.Response:
        data = _checked(await asked(request), {"id", "session_id", "group", "label", "metadata"})
        name = session_name(data.get("id")) or session_name(data.get("session_id"))
        session = sessions.open(name, group=str(data.get("group") or ""))
        if data.get("label") is not None:
            session.base.label = _label(data)
        session.base.metadata = {**session.base.metadata, **(data.get("metadata") or {})}
        sessions.keep(session)
        return reply(_told(session))

    async def every(request: web.Request) -> web.Response:
        return reply({"sessions": [_told(s) for s in sessions], "counts": sessions.counts})

    async def one(request: web.Request) -> web.Response:
        return reply(_told(sessions.get(request.match_info["id"])))

    async def end(request: web.Request) -> web.Response:
        data = await asked(request)
        return _end(request.match_info["id"], data, "end")

    async def feedback(request: web.Request) -> web.Response:
        data = await asked(request)
        if not (name := session_name(data.get("session_id"))):
            raise BadRequest("give session_id: it is in the x-session-id header of every answer")
        if data.get("reward") is None and data.get("label") is None:
            raise BadRequest("give reward (a number) or label (what the reward function compares with)")
        return _end(name, data, "feedback")

    def _end(id_: str, data: dict[str, Any], why: str) -> web.Response:
        _checked(data, {"session_id", "reward", "label", "metadata"})
        reward = data.get("reward")
        if isinstance(reward, bool) or (reward is not None and not isinstance(reward, int | float)) or reward != reward:
            raise BadRequest(f"reward {reward!r} is not a number")
        found = sessions.end(
            id_,
            reward=None if reward is None else float(reward),
            label=_label(data),
            why=why,
            metadata=dict(data.get("metadata") or {}),
        )
        return reply(
            {"session_id": id_, "samples": len(found), "tokens": sum(s.effective_response_length for s in found)}
        )

    found = [
        ("POST", "/sessions", begin),
        ("GET", "/sessions", every),
        ("GET", "/sessions/{id}", one),
        ("POST", "/sessions/{id}/end", end),
        ("POST", "/feedback", feedback),
    ]
    return [(method, path, _public(sessions, handler)) for method, path, handler in found]


def _public(sessions: Sessions, handler: Handler) -> Handler:
    """Where a generate function opens and ends sessions, their ids are keys: nobody else is told or ends one."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if sessions.strict:
            raise NoSession("sessions are opened and ended by the generate function here", "use `slime serve`")
        return await handler(request)

    return answer


def _checked(data: dict[str, Any], known: set[str]) -> dict[str, Any]:
    for key in data:
        if key not in known:
            raise BadRequest(f"{key!r} is not known here; known: {', '.join(sorted(known))}")
    check_kinds(data, {"metadata": (dict,)})
    return data


def _label(data: dict[str, Any]) -> str | None:
    return None if data.get("label") is None else str(data["label"])


def _told(session: Conversation) -> dict[str, Any]:
    versions = [version for turn in session.turns for version, _, _ in turn.versions]
    return {
        "session_id": session.id,
        "group": session.group,
        "turns": len(session.turns),
        "tokens": sum(len(t.output_ids) for t in session.turns),
        "weight_versions": list(dict.fromkeys(versions)),
        "tool_calls": sum(t.calls for t in session.turns),
        "ill_formed": sum(t.ill_formed for t in session.turns),
        "busy": session.busy,
    }

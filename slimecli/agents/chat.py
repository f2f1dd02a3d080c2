"""One turn of a conversation, whatever protocol asks for it: messages -> tokens -> engine -> an answer taken apart."""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slimecli.agents.conversation import Conversation, Sessions, Turn, digests_of
from slimecli.agents.text_engine import TextEngine
from slimecli.agents.tool_calls import Parsed, forced, parse, schemas_of, visible
from slimecli.engines.embedded.request import BadRequest
from slimecli.errors import SlimeError
from slimecli.rollout.replies import read_reply
from slimecli.tools.parsers import ToolCall
from slimecli.types import Message

THINK_END = "</think>"
_UNBENT: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "min_new_tokens": 0,
}
"""what bends the distribution of an answer so that the trainer could not compute its log-probs, turned off"""
_SEED_STEP = 0x9E3779B97F4A7C15
"""turns of one session have seeds that are far apart"""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request, in the terms of chat templates and `/generate`."""

    messages: list[Message]
    """as templates take them: text contents, tool arguments as dicts"""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """as OpenAI states them"""
    tool_choice: str = "auto"
    """auto, none, required, or the name of a tool"""
    parallel: bool = True
    """False: at most one call"""
    params: dict[str, Any] = field(default_factory=dict)
    """sampling parameters under the engine's names; max_new_tokens None: what the context leaves"""
    template: dict[str, Any] = field(default_factory=dict)
    """variables of the chat template"""
    logprobs: bool = False
    top_logprobs: int = 0
    think: bool = False
    """take the thinking out of the answer's text"""
    rid: str = ""
    session: str = ""
    """id of the session; empty: found by what is said"""


@dataclass(kw_only=True)
class Pending:
    """A request on its way to the engine."""

    ask: Ask
    payload: dict[str, Any]
    session: Conversation | None
    opening: str = ""
    """text that a forced call begins with; the engine was given it as the beginning of its answer"""
    inside: bool = False
    """the prompt ends inside thinking"""
    stop_is_ours: str = ""
    """stop string that ends a call; not the caller's"""

    @property
    def has_tools(self) -> bool:
        """Whether the model was told of tools."""
        return bool(self.ask.tools) and self.ask.tool_choice != "none"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, or what there is of it."""

    content: str
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    """[calls] what the wire calls them"""
    ill_formed: bool = False
    reason: str | None = None
    """stop, length, abort or tool_calls; None: it is not finished"""
    item: dict[str, Any] = field(default_factory=dict)
    """the engine's reply"""
    index: int = 0

    @property
    def message(self) -> Message:
        """As a template takes it."""
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.calls]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})


class Chat:
    """Turns over an engine.

    Args:
        sessions: where turns are kept; None: every request stands for itself.
        sampling: sampling parameters that override the caller's, as training needs those of the recipe.
    """

    def __init__(
        self, engine: TextEngine, sessions: Sessions | None = None, sampling: Mapping[str, Any] | None = None
    ) -> None:
        self.engine = engine
        self.sessions = sessions
        self._sampling = dict(sampling or {})

    def prepare(self, ask: Ask) -> Pending:
        """Check a request and make the engine's payload of it."""
        if self.sessions is None:
            return self._prepared(ask, None, [])
        digests = digests_of(ask.messages, ask.tools)
        session = self.sessions.find(ask.session, digests)
        try:
            return self._prepared(ask, session, digests)
        except SlimeError:
            self.sessions.leave(session)
            raise

    def _prepared(self, ask: Ask, session: Conversation | None, digests: list[str]) -> Pending:
        template = dict(ask.template)
        if ask.tools and ask.tool_choice != "none":
            template["tools"] = ask.tools
        if self.sessions is None or session is None:
            text = self.engine.codec.render(ask.messages, **template)
            ids = self.engine.codec.ids(text)
        else:
            prompt = self.sessions.prompt(session, ask.messages, digests, **template)
            text, ids = prompt.text, prompt.ids
        opening = self._opening(ask)
        ids = ids + (self.engine.codec.ids(opening) if opening else [])
        payload = self._payload(ask, ids, session)
        ours = self.engine.tools.close if template.get("tools") and not ask.parallel else ""
        if ours:
            payload["sampling_params"]["stop"] = [*_strings(payload["sampling_params"].get("stop")), ours]
        if session is not None:
            payload |= {"return_logprob": True, "routing_key": session.id}
        inside = text.rstrip().endswith("<think>") and not opening
        return Pending(ask=ask, payload=payload, session=session, opening=opening, inside=inside, stop_is_ours=ours)

    def _opening(self, ask: Ask) -> str:
        if ask.tool_choice in ("auto", "none"):
            return ""
        names = schemas_of(ask.tools)
        name = "" if ask.tool_choice == "required" else ask.tool_choice
        if not names or (name and name not in names):
            raise BadRequest(f"tool_choice {ask.tool_choice!r}, but the tools are {sorted(names) or 'none'}")
        if not self.engine.tools.opening:
            raise BadRequest("this model's tool calls cannot be forced", 'use tool_choice "auto"')
        return forced(self.engine.tools, name)

    def _payload(self, ask: Ask, ids: list[int], session: Conversation | None) -> dict[str, Any]:
        room = self.engine.max_context - len(ids)
        params = {**ask.params, **self._sampling}
        budget = params.get("max_new_tokens")
        params["max_new_tokens"] = max(room, 0) if budget is None else budget
        if session is not None:
            if room <= 0:
                raise BadRequest(
                    f"the conversation has {len(ids)} tokens, the context {self.engine.max_context}",
                    "end it, or serve with a larger engine.max_context",
                )
            own = dict(session.sampling)
            # an agent asks for round numbers; what does not fit would be refused
            params["max_new_tokens"] = min(params["max_new_tokens"], own.pop("max_new_tokens", room), room)
            if own.get("sampling_seed") is not None:
                own["sampling_seed"] = (own["sampling_seed"] + session.asked * _SEED_STEP) % 2**62
            session.asked += 1
            params |= own | _UNBENT
        if ask.tools:
            params.setdefault("skip_special_tokens", False)  # some families write calls with special tokens
        return {
            "input_ids": ids,
            "sampling_params": params,
            "return_logprob": ask.logprobs,
            "top_logprobs_num": ask.top_logprobs,
            "rid": ask.rid or uuid.uuid4().hex,
        }

    async def answer(self, pending: Pending) -> list[Answer]:
        """All answers."""
        with self._busy(pending.session):
            found = await self.engine.generate(pending.payload)
            answers = [self._whole(pending, item, index) for index, item in enumerate(found)]
            for answer in answers:
                self._record(pending, answer)
        return answers

    async def stream(self, pending: Pending) -> AsyncGenerator[Answer]:
        """The answers so far; what they show of text is never taken back. The last of each index has a reason."""
        with self._busy(pending.session):
            async for item in self.engine.stream({**pending.payload, "stream": True}):
                if item["meta_info"]["finish_reason"] is None:
                    yield self._partial(pending, item)
                    continue
                answer = self._whole(pending, item, item["index"])
                self._record(pending, answer)
                yield answer

    @contextlib.contextmanager
    def _busy(self, session: Conversation | None) -> Iterator[None]:
        """A session with a request in flight is not idle; one that never got an answer is forgotten."""
        if self.sessions is None or session is None:
            yield
            return
        session.busy += 1
        try:
            yield
        finally:
            session.busy -= 1
            self.sessions.leave(session)

    def _whole(self, pending: Pending, item: dict[str, Any], index: int) -> Answer:
        reason = item["meta_info"]["finish_reason"]
        text, kind = pending.opening + item["text"], reason["type"]
        if (
            pending.stop_is_ours
            and reason.get("matched") == pending.stop_is_ours
            and not text.endswith(pending.stop_is_ours)
        ):
            text += pending.stop_is_ours
        thinking, rest = self._split(pending, text)
        parsed = Parsed(content=rest)
        if pending.has_tools:
            parsed = parse(rest, self.engine.tools, schemas_of(pending.ask.tools))
            self.engine.counts["tool_calls"] += len(parsed.calls)
            self.engine.counts["ill_formed"] += parsed.ill_formed
        return Answer(
            content=parsed.content,
            thinking=thinking,
            calls=parsed.calls,
            ids=self._call_ids(pending, item, len(parsed.calls)),
            ill_formed=parsed.ill_formed,
            reason="tool_calls" if parsed.calls and kind == "stop" else kind,
            item=item,
            index=index,
        )

    def _call_ids(self, pending: Pending, item: dict[str, Any], count: int) -> list[str]:
        """Names of an answer's calls: some templates write them into the prompt, so they are the same in equal runs."""
        said = hashlib.sha256(json.dumps([pending.payload["input_ids"], item["output_ids"]]).encode())
        found = [hashlib.sha256(f"{said.hexdigest()} {number}".encode()).hexdigest() for number in range(count)]
        # Mistral's templates demand nine letters and digits
        return [digest[:9] if self.engine.tools.parser == "mistral" else f"call_{digest[:24]}" for digest in found]

    def _partial(self, pending: Pending, item: dict[str, Any]) -> Answer:
        text = stable_text(item["text"], pending.payload["sampling_params"].get("stop"))
        thinking, rest = self._split(pending, pending.opening + text)
        if pending.has_tools:
            rest = visible(rest, self.engine.tools)
        return Answer(content=rest, thinking=thinking, item=item, index=item["index"])

    def _split(self, pending: Pending, text: str) -> tuple[str, str]:
        """(thinking, the rest); while thinking goes on, there is no rest."""
        if not pending.ask.think or not self.engine.thinks:
            return "", text
        before, ended, after = text.partition(THINK_END)
        begins = text.lstrip().startswith("<think>")
        if ended and (begins or pending.inside):
            return before.strip().removeprefix("<think>").strip(), after.lstrip("\n")
        if begins or pending.inside:
            return _held(text.lstrip().removeprefix("<think>").lstrip(), THINK_END), ""
        return ("", "") if text.strip() and "<think>".startswith(text.strip()) else ("", text)

    def _record(self, pending: Pending, answer: Answer) -> None:
        if pending.session is None or self.sessions is None:
            return
        said, reason = read_reply(answer.item), answer.item["meta_info"]["finish_reason"]
        if said.ids != list(answer.item["output_ids"]):
            raise SlimeError(
                "the engine's output_ids differ from its output_token_logprobs", "report the engine's version"
            )
        digests = digests_of([*pending.ask.messages, answer.message], pending.ask.tools)
        self.sessions.record(
            pending.session,
            Turn(
                number=0,
                key=digests[-1],
                prompt_ids=list(pending.payload["input_ids"]),
                output_ids=said.ids,
                log_probs=[min(p, 0.0) for p in said.log_probs],
                versions=[list(span) for span in said.versions],
                finish=said.finish,
                matched=reason.get("matched"),
                calls=len(answer.calls),
                ill_formed=answer.ill_formed,
            ),
        )


def stable_text(text: str, stops: Any) -> str:
    """The part that later tokens cannot change: no half character, no beginning of a stop string."""
    text = text.rstrip("\ufffd")
    for stop in _strings(stops):
        text = _held(text, stop)
    return text


def _held(text: str, mark: str) -> str:
    """The text without an ending that may become the mark."""
    held = max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
    return text[: len(text) - held]


def _strings(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])

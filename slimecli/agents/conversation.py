"""Sessions: who said what, as the exact token ids that the engine saw and said.

A request states the whole conversation as messages. Where these repeat what was said before and go on, the stored token
ids stay and only what is new is tokenized; so what is trained on is what was generated, however the client or the chat
template would write it down again. A request that does not go on from an earlier turn is rendered from its beginning.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimecli.agents.text_engine import TextEngine
from slimecli.engines.embedded.request import BadRequest
from slimecli.errors import SlimeError
from slimecli.rollout.segments import Trajectory
from slimecli.types import LAST_TURN, Message, Sample

STAND_IN = "SLIME-TURN-7f3a9c51"
"""rendered in the place of the last answer, to see what the template writes after it"""


class NoSession(SlimeError):
    """No open session has this id."""

    http_status = 404


@dataclass(kw_only=True)
class Turn:
    """One request and the answer to it."""

    number: int
    key: str
    """digest of the conversation, the answer included: what the next request states"""
    prompt_ids: list[int]
    output_ids: list[int]
    log_probs: list[float]
    versions: list[list[Any]]
    """[version, start, end]: whose weights said which of the output's tokens, in order"""
    finish: str
    """SGLang's finish_reason.type"""
    matched: int | str | None = None
    """the end token or stop string that ended it"""
    calls: int = 0
    ill_formed: bool = False
    """it has the marker of a tool call, but none could be read"""


@dataclass(kw_only=True)
class Conversation:
    """One session."""

    id: str
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """unlike the id, which clients choose, never used twice"""
    turns: list[Turn] = field(default_factory=list)
    base: Sample = field(default_factory=Sample)
    """what its samples take over: label, metadata"""
    group: str = ""
    """sessions of one task share it; their rewards are compared with each other"""
    sampling: dict[str, Any] = field(default_factory=dict)
    """parameters that override the caller's; `max_new_tokens` is a limit, `sampling_seed` moves on with every turn"""
    used: float = field(default_factory=time.monotonic)
    """when it was last spoken with (monotonic seconds)"""
    asked: int = 0
    """requests so far, those in flight included: each has a seed of its own"""
    busy: int = 0
    """requests in flight"""
    stated: bool = False
    """it stays open without a word: it was opened on purpose, or by an earlier server"""

    def by_key(self, key: str) -> Turn | None:
        """The newest turn that a conversation with this digest goes on from."""
        return next((t for t in reversed(self.turns) if t.key == key), None)

    def samples(self, decode: Callable[[list[int]], str], *, max_tokens: int = 0) -> list[Sample]:
        """What is trained on: one sample per linear sequence of tokens, without a reward yet."""
        if not self.turns:
            return []
        trajectory = Trajectory(max_tokens=max_tokens)
        for turn in self.turns:
            spans = [(str(version), start, end) for version, start, end in turn.versions]
            trajectory.append_turn(turn.prompt_ids, turn.output_ids, turn.log_probs, spans, turn.finish)
        if self.base.session_id is None:
            self.base.session_id = self.id
        found = trajectory.samples(self.base, decode)
        for sample in found:
            sample.metadata |= {"breaks": trajectory.breaks, "tool_calls": sum(t.calls for t in self.turns)}
            sample.metadata["ill_formed"] = sum(t.ill_formed for t in self.turns)
        found[-1].metadata[LAST_TURN] = decode(self.turns[-1].output_ids)  # it is the one that is scored
        return found


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the engine is asked."""

    ids: list[int]
    text: str
    """as the template renders it, for what its end tells"""
    stitched: bool
    """it goes on from an earlier turn's tokens"""


class Sessions:
    """All open sessions of a server. Used from one event loop.

    Args:
        engine: whose tokenizer and template are used.
        strict: only sessions that were opened may be spoken in, so that an agent that was given up finds no one.
        on_open: called with a session of which something was stated beforehand, e.g. to write it down.
        on_turn: called after every answer.
        on_end: called with a session that ends, its samples, and why.
    """

    def __init__(
        self,
        engine: TextEngine,
        *,
        max_tokens: int = 0,
        strict: bool = False,
        on_open: Callable[[Conversation], None] | None = None,
        on_turn: Callable[[Conversation, Turn], None] | None = None,
        on_end: Callable[[Conversation, list[Sample], str], None] | None = None,
    ) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self.strict = strict
        self._on_open = on_open
        self._on_turn = on_turn
        self._on_end = on_end
        self._open: dict[str, Conversation] = {}
        self._by_key: dict[str, str] = {}
        """digest -> session, for requests that name none"""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Any:
        return iter(list(self._open.values()))

    def open(self, id_: str = "", *, group: str = "", base: Sample | None = None) -> Conversation:
        """A new session, or the one of this id; what is stated of it is taken over."""
        name = id_ or uuid.uuid4().hex
        found = self._open.setdefault(name, Conversation(id=name))
        found.group = group or found.group
        if base is not None:
            found.base = base
        return found

    @property
    def counts(self) -> dict[str, int]:
        """What happened: `tool_calls`, `ill_formed` calls, histories `rendered` anew, answers too `late` to be kept."""
        return dict(sorted(self._engine.counts.items()))

    def keep(self, session: Conversation) -> None:
        """Have what was stated of a session written down; it stays open without a word."""
        session.stated = True
        if self._on_open is not None:
            self._on_open(session)

    def adopt(self, conversation: Conversation) -> None:
        """Take over a session that an earlier server had open."""
        conversation.stated = True
        self._open[conversation.id] = conversation
        self._by_key |= {turn.key: conversation.id for turn in conversation.turns}

    def leave(self, session: Conversation) -> None:
        """Forget a session that began with a request which got no answer."""
        if not (self.strict or session.turns or session.busy or session.stated):
            self.drop(session.id)

    def get(self, id_: str) -> Conversation:
        """An open session."""
        if id_ not in self._open:
            raise NoSession(
                f"no open session {id_!r}", "it has ended, or was never spoken with; GET /sessions lists them"
            )
        return self._open[id_]

    def find(self, id_: str, digests: Sequence[str]) -> Conversation:
        """The session of a request: by its id, else by the longest conversation it goes on from, else a new one."""
        if id_ or self.strict:
            return self.get(id_) if self.strict else self.open(id_)
        for key in reversed(digests):
            if self._by_key.get(key) in self._open:
                return self._open[self._by_key[key]]
        return self.open()

    def prompt(self, session: Conversation, messages: list[Message], digests: Sequence[str], **template: Any) -> Prompt:
        """Token ids of a request: those said before, as they were, and what is new.

        Args:
            template: `tools`, and further variables of the chat template.
        """
        text = self._engine.codec.render(messages, **template)
        for count in range(len(messages) - 1, 0, -1):
            turn = session.by_key(digests[count])
            if turn is None:
                continue
            ids = self._go_on(turn, messages, count, template)
            if ids is not None:
                return Prompt(ids=ids, text=text, stitched=True)
        self._engine.counts["rendered"] += 1
        return Prompt(ids=self._engine.codec.ids(text), text=text, stitched=False)

    def _go_on(self, turn: Turn, messages: list[Message], count: int, template: dict[str, Any]) -> list[int] | None:
        """The turn's tokens and those of what follows its answer; None where the template shows no answer there."""
        codec = self._engine.codec
        stand_in = {"role": "assistant", "content": STAND_IN}
        try:
            text = codec.render([*messages[: count - 1], stand_in, *messages[count:]], **template)
        except BadRequest:  # a template that wants a call before a tool's answer
            return None
        _, found, after = text.partition(STAND_IN)
        if not found or STAND_IN in after:
            return None
        said = turn.prompt_ids + turn.output_ids
        if turn.finish == "stop" and isinstance(turn.matched, int) and turn.output_ids:
            end = codec.decode([[turn.output_ids[-1]]], False)[0]
            if end and after.startswith(end):
                return said + codec.ids(after[len(end) :])
            return said[:-1] + codec.ids(after)
        return said + codec.ids(after)

    def record(self, session: Conversation, turn: Turn) -> None:
        """An answer was given. One that comes after its session has ended is too late to be learnt from."""
        if self._open.get(session.id) is not session:
            self._engine.counts["late"] += 1
            return
        turn.number = len(session.turns)
        session.used = time.monotonic()
        if self._on_turn is not None:
            self._on_turn(session, turn)  # where it raises nobody hears the answer: then it was not given
        session.turns.append(turn)
        self._by_key[turn.key] = session.id

    def end(
        self,
        id_: str,
        *,
        reward: float | None = None,
        label: str | None = None,
        why: str = "end",
        metadata: dict[str, Any] | None = None,
    ) -> list[Sample]:
        """Close a session; its samples, which share the reward."""
        session = self.get(id_)
        session.base.label = session.base.label if label is None else label
        session.base.metadata = {**session.base.metadata, **(metadata or {})}
        found = session.samples(lambda ids: self._engine.codec.decode([ids], True)[0], max_tokens=self._max_tokens)
        for sample in found:
            sample.reward = reward
        if self._on_end is not None:
            self._on_end(session, found, why)
        self.drop(id_)
        return found

    def drop(self, id_: str) -> None:
        """Forget a session. Of one that is not open nothing is left to forget."""
        gone = self._open.pop(id_, None)
        for turn in gone.turns if gone else ():
            if self._by_key.get(turn.key) == id_:
                del self._by_key[turn.key]

    def idle(self, seconds: float) -> list[str]:
        """Ids of sessions that nobody has spoken with for so long."""
        now = time.monotonic()
        return [s.id for s in self._open.values() if not s.busy and now - s.used >= seconds]


def digests_of(messages: Sequence[Message], tools: Any = None) -> list[str]:
    """[len(messages) + 1] of the conversation before each message, and of the whole.

    Ids of calls, thinking and white space at the ends are left out: clients do not always send them back as they were.
    """
    digest = hashlib.sha256(json.dumps(tools or [], sort_keys=True).encode())
    found = [digest.hexdigest()]
    for message in messages:
        digest.update(json.dumps(_essence(message), sort_keys=True).encode())
        found.append(digest.hexdigest())
    return found


def _essence(message: Message) -> list[Any]:
    calls = [c.get("function", c) for c in message.get("tool_calls") or []]
    return [
        message.get("role"),
        str(message.get("content") or "").strip(),
        [[c["name"], c["arguments"]] for c in calls],
    ]

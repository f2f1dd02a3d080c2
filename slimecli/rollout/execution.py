"""One answer of `tool_loop` on its way: conversation, trajectory, and what is needed to continue it at a later step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from slimecli.rollout.replies import Said
from slimecli.rollout.segments import Trajectory
from slimecli.rollout.turns import Conversation
from slimecli.types import Message, Sample, SampleStatus


@dataclass(kw_only=True)
class Execution:
    """One answer. Its state is a JSON value in the sample's metadata while it is interrupted."""

    args: Any
    sample: Sample
    params: dict[str, Any]
    talk: Conversation
    trajectory: Trajectory
    offered: list[str]
    """names of the tools that the model was shown"""
    prompt_tokens: int
    log: list[dict[str, Any]] = field(default_factory=list)
    """finished turns: {"pieces": replies, "heard": messages, "calls", "text"}"""
    begun: list[Said] = field(default_factory=list)
    """replies to the present turn, of which all but the last were interrupted"""
    old: int = 0
    """how many of `begun` are not trained on"""
    stats: dict[str, float] = field(default_factory=lambda: {"tool_calls": 0.0, "tool_errors": 0.0})
    tool_seconds: float = 0.0
    finish: str = "stop"
    """how the last turn ended; `length` as well when turns or room ran out"""

    @property
    def prompt_ids(self) -> list[int]:
        """What the engine is given next."""
        return [*self.talk.ids, *(t for piece in self.begun for t in piece.ids)]

    def room(self, max_turn_tokens: int) -> int:
        """Tokens that the next reply may have: of the answer's budget, of the engine's context, of the turn's own."""
        length = len(self.prompt_ids)
        most = min(self.params["max_new_tokens"] + self.prompt_tokens, self.args.recipe.max_context)
        if max_turn_tokens:
            most = min(most, len(self.talk.ids) + max_turn_tokens)
        return int(most - length)

    def finish_turn(self) -> str:
        """Put the replies of the present turn into the conversation; its text."""
        prompt = self.talk.ids
        for number, piece in enumerate(self.begun):
            spans = [(str(version), start, end) for version, start, end in piece.versions]
            trained = number >= self.old
            self.trajectory.append_turn(prompt, piece.ids, piece.log_probs, spans, piece.finish, trained)
            prompt = [*prompt, *piece.ids]
        self.log.append({"pieces": [asdict(piece) for piece in self.begun]})
        self.begun, self.old = [], 0
        return self.talk.say(prompt[len(self.talk.ids) :])

    def hear(self, messages: list[Message], calls: list[dict[str, Any]], text: str) -> None:
        """Put tool outputs into the conversation."""
        self.log[-1] |= {"heard": messages, "calls": calls, "text": text}
        self.talk.hear(messages, calls, text)

    def interrupted(self) -> Sample:
        """The sample with all that was said and heard, to be continued; its tools are not run again."""
        begun = [asdict(piece) for piece in self.begun]
        state = {"turns": self.log, "begun": begun, "stats": self.stats, "tool_seconds": self.tool_seconds}
        pieces = [piece for turn in self.log for piece in turn["pieces"]] + begun
        self.sample.status = SampleStatus.ABORTED
        self.sample.metadata = {**self.sample.metadata, "unfinished": state}
        self.sample.weight_versions = list(dict.fromkeys(str(span[0]) for p in pieces for span in p["versions"]))
        return self.sample

    def resume(self) -> None:
        """Take up an interrupted sample, if it is one. A loss mask on it means: do not train on what it had said."""
        state = self.sample.metadata.get("unfinished")
        is_masked = self.sample.loss_mask is not None
        self.sample.loss_mask = None
        if not state:
            return
        for turn in state["turns"]:
            self._take_up(turn["pieces"], is_masked)
            self.finish_turn()
            self.hear(turn["heard"], turn["calls"], turn["text"])
        self._take_up(state["begun"], is_masked)
        self.stats, self.tool_seconds = dict(state["stats"]), state["tool_seconds"]

    def _take_up(self, pieces: list[dict[str, Any]], is_masked: bool) -> None:
        self.begun = [Said(**piece) for piece in pieces]
        self.old = len(self.begun) if is_masked else 0

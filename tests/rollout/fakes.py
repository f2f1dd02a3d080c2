"""An engine that answers from a script, for tests about its callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from slimecli.errors import SlimeError


class ScriptedEngine:
    """`answer(prompt_ids, params)` -> token ids; every token has log-probability -0.5."""

    def __init__(self, answer: Callable[[list[int], Mapping[str, Any]], list[int]], fail_on: int | None = None) -> None:
        self.answer = answer
        self.fail_on = fail_on
        self.calls: list[Mapping[str, Any]] = []

    async def generate(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.calls.append(payload)
        if self.fail_on is not None and payload["input_ids"][0][0] == self.fail_on:
            raise SlimeError("engine 0 died", "restart it")
        return [self._reply(i, p) for i, p in zip(payload["input_ids"], payload["sampling_params"], strict=True)]

    def _reply(self, ids: list[int], params: Mapping[str, Any]) -> dict[str, Any]:
        out = self.answer(ids, params)
        return {
            "text": " ".join(map(str, out)),
            "output_ids": out,
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-0.5, t, None] for t in out],
                "weight_version": "3",
            },
        }


class PacedEngine:
    """Says one token per tick: the number of the weights it holds, `length(prompt_ids)` of them in all, then 2.

    Weights may change while answers run; an abort ends them with what they have.
    """

    def __init__(self, length: Callable[[list[int]], int], tick_s: float = 0.001) -> None:
        self.length = length
        self.tick_s = tick_s
        self.version = 0
        self.running = self.most = 0
        self.calls: list[Mapping[str, Any]] = []
        self._aborts = 0

    async def generate(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.calls.append(payload)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            answers = zip(payload["input_ids"], payload["sampling_params"], strict=True)
            return list(await asyncio.gather(*(self._say(ids, params) for ids, params in answers)))
        finally:
            self.running -= 1

    async def _say(self, ids: list[int], params: Mapping[str, Any]) -> dict[str, Any]:
        aborts, said, reason = self._aborts, [], "length"
        left = self.length(ids) - (len(ids) - 1)  # prompts of these tests are one token long
        while len(said) < params["max_new_tokens"]:
            await asyncio.sleep(self.tick_s)
            if self._aborts > aborts:
                reason = "abort"
                break
            said.append(100 + self.version if len(said) + 1 < left else 2)
            if said[-1] == 2:
                reason = "stop"
                break
        spans: list[dict[str, Any]] = []
        for i, token in enumerate(said):
            version = str(token - 100) if token != 2 else str(self.version)
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": i, "end": i})
            spans[-1]["end"] = i + 1
        return {
            "text": "".join(f"<{t}>" for t in said),
            "output_ids": said,
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [[-0.5, t, None] for t in said],
                "weight_version": str(self.version),
                "weight_versions": spans,
            },
        }

    async def abort(self, rid: str | None = None) -> None:
        self._aborts += 1

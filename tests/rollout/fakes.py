"""An engine that answers from a script, for tests about its callers."""

from __future__ import annotations

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

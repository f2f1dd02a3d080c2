"""A TextEngine whose answers are written beforehand: tokens of a real tokenizer, log-probs of their own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimecli.agents.text_engine import TextEngine
from slimecli.engines.embedded.text import TextCodec
from tests.models import tiny_tokenizer

TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's shape: tool results as user messages, calls as JSON, thinking of earlier turns left out"""
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name":   "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
"""spaced otherwise than a template would write it down again"""


class Scripted:
    """A RolloutEngine that says its lines in turn. The end token ends a line; a tuple (text, reason) ends otherwise."""

    def __init__(self, folder: Path, lines: list[Any]) -> None:
        tokenizer = tiny_tokenizer(folder)
        tokenizer.chat_template = TOOLS_TEMPLATE
        tokenizer.save_pretrained(folder)
        self.codec = TextCodec(folder, 300)
        self.lines = list(lines)
        self.asked: list[dict[str, Any]] = []
        self.version = "3"

    async def generate(self, payload: Mapping[str, Any]) -> Any:
        self.asked.append(dict(payload))
        line = self.lines.pop(0)
        text, reason = line if isinstance(line, tuple) else (line, {"type": "stop", "matched": 2})
        ids = self.codec.ids(text) + ([2] if reason.get("matched") == 2 else [])
        meta = {
            "finish_reason": reason,
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5 - i / 100, token, None] for i, token in enumerate(ids)],
        }
        return {"text": text, "output_ids": ids, "meta_info": meta}

    async def stream(self, payload: Mapping[str, Any]) -> Any:
        """The answer character by character, as its tokens are in a tiny vocabulary."""
        whole = await self.generate(payload)
        for end in range(1, len(whole["output_ids"])):
            ids = whole["output_ids"][:end]
            meta = {**whole["meta_info"], "finish_reason": None, "completion_tokens": end}
            meta["output_token_logprobs"] = meta["output_token_logprobs"][:end]
            yield {"text": self.codec.decode([ids], False)[0], "output_ids": ids, "meta_info": meta, "index": 0}
        yield {**whole, "index": 0}


def scripted(folder: Path, *lines: Any, max_context: int = 4096, family: str = "qwen3") -> tuple[Scripted, TextEngine]:
    """The engine, and the TextEngine over it."""
    own = Scripted(folder, list(lines))
    text = TextEngine(own, own.codec, name="tiny", max_context=max_context, family=family, stream=own.stream)
    return own, text


def http(url: str, payload: Any = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any, Any]:
    """(status, body, headers) of one call; server-sent events as a list."""
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            if answer.headers.get_content_type() == "text/event-stream":
                lines = [x.removeprefix("data: ") for x in text.split("\n") if x.startswith("data: ")]
                return answer.status, [json.loads(x) for x in lines if x != "[DONE]"], answer.headers
            return answer.status, json.loads(text or "null"), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers

"""An agent that knows nothing of slime: it needs a base URL, a key, and an OpenAI-compatible server behind them.

python examples/calculator_agent/agent.py http://127.0.0.1:8000/v1 any-key "What is 12 * 7 + 5?"
"""

from __future__ import annotations

import ast
import json
import operator
import re
import sys
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "e.g. (3 + 4) * 5"}},
            "required": ["expression"],
        },
    },
}
SYSTEM = "You solve arithmetic with the calculator. Say the result as `Answer: NUMBER`."
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}


def solve(base_url: str, api_key: str, question: str, *, max_turns: int = 4, **body: Any) -> str:
    """The model's answer, after as many calls of the calculator as it makes; empty if it never says one."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(max_turns):
        message = ask(base_url, api_key, {"messages": messages, "tools": [TOOL], **body})
        messages.append(message)
        for call in message.get("tool_calls") or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": run(call["function"])})
        if message.get("tool_calls"):
            continue
        found = re.findall(r"Answer:\s*(-?\d+)", message.get("content") or "")
        if found:
            return found[-1]
        messages.append({"role": "user", "content": "Say `Answer: NUMBER`."})
    return ""


def ask(base_url: str, api_key: str, body: dict[str, Any]) -> dict[str, Any]:
    """One chat completion: the assistant's message."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    data = json.dumps({"model": "policy", **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", data, headers)) as reply:
        message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"] or ""} | (
        {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    )


def run(function: dict[str, Any]) -> str:
    """What the calculator says to a call; what is wrong with the call is told to the model."""
    try:
        expression = str(json.loads(function["arguments"])["expression"])[:200]
        return str(_value(ast.parse(expression, mode="eval").body))
    except (KeyError, TypeError, ValueError, SyntaxError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError(f"no arithmetic: {type(node).__name__}")


if __name__ == "__main__":
    print(solve(*sys.argv[1:4]))

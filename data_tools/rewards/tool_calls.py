"""Scorer of function calls: what is called, and with what, as the label says."""

from __future__ import annotations

import json
import re
from typing import Any

from slimecli.errors import DataError

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when the <tool_call> blocks (else the whole response, as JSON) are the calls of the label, in any order."""
    try:
        wanted = _calls(json.loads(label or ""))
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise DataError(
            f'reward tool_calls needs a label like [{{"name": ..., "arguments": {{...}}}}]: {error}', "see data.convert"
        ) from None
    try:
        given = _calls(_parsed(response))
    except (json.JSONDecodeError, TypeError, KeyError):
        return 0.0
    return float(given == wanted)


def _parsed(response: str) -> list[Any]:
    blocks = _CALL.findall(response)
    if blocks:
        return [json.loads(block) for block in blocks]
    whole = json.loads(response)
    return whole if isinstance(whole, list) else [whole]


def _calls(calls: list[Any]) -> list[str]:
    return sorted(json.dumps([call["name"], call["arguments"]], sort_keys=True) for call in calls)

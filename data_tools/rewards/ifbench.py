"""Instructions whose fulfilment a program can check, under the names of IFEval and IFBench.

A row's metadata holds `instruction_id_list` and `kwargs`, a dict for each id (None values are left out), as the
published data sets do. INSTRUCTIONS lists what is known; ids that need a language model, a tagger or a word list are
not, and a row with one is an error. Sentences are told by a rule (a mark that ends one, then space and no small
letter), where the published checkers use NLTK's punkt: counts may differ at rare abbreviations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from slimecli.data_tools.rewards.instructions_ifbench import IFBENCH
from slimecli.data_tools.rewards.instructions_ifeval import IFEVAL
from slimecli.errors import DataError, nearest

INSTRUCTIONS: dict[str, Callable[..., bool]] = {**IFEVAL, **IFBENCH}
"""id -> function(text, **kwargs) -> whether the text follows it"""


def score(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 when all instructions of the row are followed; with metadata.partial the share of them."""
    ids, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not ids or not isinstance(arguments, list) or len(arguments) != len(ids):
        raise DataError(
            "reward ifbench needs metadata.instruction_id_list and as many metadata.kwargs",
            "prepare the data with both columns in metadata",
        )
    said = response.rpartition("</think>")[2].strip()
    followed = [
        bool(said) and _follows(said, name, given or {}, metadata) for name, given in zip(ids, arguments, strict=True)
    ]
    return sum(followed) / len(followed) if metadata.get("partial") else float(all(followed))


def _follows(text: str, name: str, given: dict[str, Any], metadata: dict[str, Any]) -> bool:
    check = INSTRUCTIONS.get(name)
    if check is None:
        raise DataError(
            f"instruction {name!r} is not one that slime checks{nearest(name, list(INSTRUCTIONS))}",
            "leave such rows out; docs/rewards.md lists the known ones",
        )
    known = inspect.signature(check).parameters
    arguments = {k: v for k, v in given.items() if v is not None}
    if "prompt_to_repeat" in known:
        arguments.setdefault("prompt_to_repeat", metadata.get("prompt_text"))
    try:
        return bool(check(text, **arguments))
    except TypeError as error:
        wanted = ", ".join(list(known)[1:]) or "nothing"
        raise DataError(
            f"instruction {name} takes {wanted} and was given {sorted(arguments)}: {error}", "mend metadata.kwargs"
        ) from None

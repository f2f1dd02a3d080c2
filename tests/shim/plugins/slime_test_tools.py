"""A module beside a plugin, as slime's tool-use examples have one; it imports slime as well."""

import re

from slime.utils.types import Sample

FENCE = re.compile(r"<code>(.*?)</code>", re.DOTALL)


def run_tool(text: str) -> str:
    found = FENCE.search(text)
    return f"\n<output>{len(found[1])}</output>\n" if found else "\n<output>no code</output>\n"


def lazy_status(name: str):
    from slime.utils.types import Sample as Again

    assert Again is Sample
    return Again.Status[name]

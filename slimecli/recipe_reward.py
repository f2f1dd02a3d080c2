"""The reward section of a recipe. The string under each field is its help text, unit included."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slimecli.recipe_sections import Section


class JudgeSection(Section):
    """A model as judge, behind any OpenAI-compatible server."""

    url: str = ""
    """address of the server, with or without /v1, e.g. http://127.0.0.1:30000"""
    model: str = ""
    """model name sent with every request; some servers ignore it"""
    prompt: str = ""
    """template over {prompt}, {response}, {label} (compare: also {first}, {second}); empty: slime's own"""
    low: float = 0.0
    """verdict that becomes 0"""
    high: float = 10.0
    """verdict that becomes 1"""
    max_tokens: int = Field(1024, gt=0)
    """longest verdict (tokens)"""
    temperature: float = Field(0.0, ge=0)
    """sampling temperature of the judge; 0: greedy"""
    api_key_env: str = ""
    """environment variable that holds the server's key; empty: none is sent"""


class CodeSection(Section):
    """Limits on code that is run to score it."""

    wall_s: float = Field(6.0, gt=0)
    """deadline of one test (seconds)"""
    memory_mb: int = Field(1024, ge=64)
    """address space of one process (MiB)"""
    processes: int = Field(8, ge=1)
    """processes and threads at a time"""
    isolation: Literal["required", "best", "limits"] = "best"
    """what the machine must cut code off from: network, processes and files; processes; or nothing beyond the limits"""


class TournamentSection(Section):
    """Ranking of the answers of a group against each other."""

    schedule: Literal["single_elimination", "round_robin"] = "round_robin"
    """who meets whom; a seed decides the bracket"""
    compare: str = "judge"
    """`judge`, or own `async (args, first, second) -> 1 first wins, 0 second wins, 0.5 a draw`, as file.py:function"""
    both_orders: bool = True
    """ask for (a, b) and (b, a) and take the mean: a judge prefers a place"""


class RewardSection(Section):
    """How answers are scored."""

    type: str = "exact"
    """built-in scorer, see `slime reward --list`; a row's metadata.rm_type overrides it"""
    path: str = ""
    """own scorer, `module:function` or `file.py:function`; empty: the built-in one"""
    key: str = ""
    """which of several named scores is the reward; empty: the one named `score`"""
    group: bool = False
    """score whole groups at once"""
    timeout_s: float = Field(30.0, gt=0)
    """deadline of one score; where groups are scored at once, of a group's (seconds)"""
    retries: int = Field(5, ge=0)
    """further tries of a server that is not there or says 408, 429 or 5xx, within the deadline"""
    rm_url: str = ""
    """address that `remote_rm` posts to"""
    mix: dict[str, float] = {}
    """for type = mix: scorer (name or file.py:function) -> weight, e.g. {math = 0.8, format = 0.2}"""
    judge: JudgeSection = JudgeSection()
    code: CodeSection = CodeSection()
    tournament: TournamentSection = TournamentSection()

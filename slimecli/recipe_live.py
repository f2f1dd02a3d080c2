"""What a recipe says of conversations that are served and learnt from. The string under each field is its help text."""

from __future__ import annotations

from pydantic import Field

from slimecli.recipe_sections import Section


class LiveSection(Section):
    """Training on served conversations: `slime serve --record RUN`, and data.train = "live:"."""

    idle_s: float = Field(600.0, gt=0)
    """a conversation that nobody goes on with for so long has ended (seconds)"""
    wait_s: float = Field(3600.0, gt=0)
    """deadline of a step for its conversations to be there (seconds)"""
    max_staleness: int = Field(-1, ge=-1)
    """conversations whose oldest weights lie further behind (steps) are left out, and counted; -1: none"""
    unscored: bool = False
    """also learn from conversations without feedback: the recipe's reward function scores them"""

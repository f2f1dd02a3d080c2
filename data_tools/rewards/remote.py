"""A reward server of one's own, asked over HTTP with slime's payload."""

from __future__ import annotations

from typing import Any

from slimecli.data_tools.rewards.http import post_json
from slimecli.errors import UsageError
from slimecli.recipe_reward import RewardSection
from slimecli.types import Sample


class RemoteReward:
    """What the server at reward.rm_url answers to {"prompt", "response", "label"}: a number, or named numbers."""

    parallel = 64

    def __init__(self, section: RewardSection) -> None:
        if not section.rm_url.startswith(("http://", "https://")):
            raise UsageError(
                f"reward.type = remote_rm needs the server's address, and reward.rm_url is {section.rm_url!r}",
                "--set reward.rm_url=http://host:port/score",
            )
        self._section = section

    async def __call__(self, args: Any, sample: Sample) -> Any:
        """The score of one sample."""
        payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        return await post_json(self._section.rm_url, payload, self._section.retries)

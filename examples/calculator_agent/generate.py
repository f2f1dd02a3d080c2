"""Trains the agent beside this file: `generate` runs it on a prompt, `reward` looks at what it answered."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from slimecli.agents.server import agent_server
from slimecli.types import Sample


def _load_agent() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calculator_agent", Path(__file__).with_name("agent.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


agent = _load_agent()


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Run the agent once. Every linear piece of its conversation becomes a sample; all share one rollout_id."""
    async with agent_server(args).session(sample, sampling_params) as session:
        # the agent blocks while it waits for answers, so it gets a thread of its own
        answer = await asyncio.to_thread(agent.solve, session.base_url, session.api_key, str(sample.prompt))
        samples = await session.samples()
    for item in samples:
        item.metadata["answer"] = answer
    return samples


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 for the right number, 0.1 for any, 0 for none."""
    answer = sample.metadata["answer"]
    return 1.0 if answer == sample.label else 0.1 if answer else 0.0

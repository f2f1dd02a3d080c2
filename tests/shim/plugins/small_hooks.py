"""Small plugins: a dynamic filter, a reward of groups, and the built-in generate function called from a plugin."""

import torch
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import generate as generate_once
from slime.utils.types import Sample


def check_spread(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float).std() > 0.0
    return DynamicFilterOutput(keep=bool(keep), reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


async def group_reward(args, samples, **kwargs):
    return [{"score": float(i), "note": "text"} for i, _ in enumerate(samples)]


async def generate(args, sample, sampling_params):
    sample = await generate_once(args, sample, sampling_params)
    args.seen = getattr(args, "seen", 0) + 1
    sample.metadata["seen"] = args.seen
    return sample


def wants_too_much(args, sample):
    from slime.backends.megatron_utils import actor

    return actor


def newest_first(args, rollout_id, buffer, num_samples):
    from slime.rollout.data_source import pop_first

    buffer.reverse()
    return pop_first(args, rollout_id, buffer, num_samples)

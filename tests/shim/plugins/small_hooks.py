"""Small plugins: a dynamic filter, a reward of groups, and the built-in generate function called from a plugin."""

import torch
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import generate as generate_once
from slime.utils.types import Sample


def check_spread(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float).std() > 0.0
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


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


async def notes_anything(args, sample, sampling_params):
    sample = await generate_once(args, sample, sampling_params)
    sample.metadata["seen"] = {torch.tensor(3), "x"}
    sample.metadata["scores"] = torch.tensor([0.5, 1.0])
    sample.loss_mask = torch.ones(sample.response_length, dtype=torch.int64)
    sample.reward = torch.tensor(2.0).numpy()[()]
    return sample


def newest_first(args, rollout_id, buffer, num_samples):
    from slime.rollout.data_source import pop_first

    buffer.reverse()
    return pop_first(args, rollout_id, buffer, num_samples)


def tensor_reward(args, sample, **kwargs):
    return torch.tensor(0.5)


def tensor_verdict(args, samples, **kwargs):
    return torch.tensor(True)

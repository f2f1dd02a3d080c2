"""slime's rollout helpers for plugins."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from slimecli.rollout.args import HookArgs
from slimecli.rollout.generate import append_reply
from slimecli.rollout.sampling import rollout_sampling
from slimecli.shim.http import post
from slimecli.shim.sample import Sample, adopted
from slimecli.shim.scoring import async_rm
from slimecli.types import SampleStatus


class GenerateState:
    """Tokenizer, sampling parameters and a bound on requests; one per run, whoever asks.

    Example: `state = GenerateState(args); ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]`
    """

    tokenizer: Any
    processor: Any
    semaphore: asyncio.Semaphore
    sampling_params: dict[str, Any]
    aborted: bool

    def __new__(cls, args: HookArgs) -> GenerateState:
        """The run's."""
        kept = args._fixed
        if "generate_state" not in kept:
            kept["generate_state"] = cls._made(args)
        found: GenerateState = kept["generate_state"]
        return found

    @classmethod
    def _made(cls, args: HookArgs) -> GenerateState:
        from slimecli.shim.text import load_processor, load_tokenizer

        state = super().__new__(cls)
        state.tokenizer = args.tokenizer or load_tokenizer(args.hf_checkpoint)
        state.processor = load_processor(args.hf_checkpoint)
        state.semaphore = asyncio.Semaphore(args.recipe.rollout.concurrency)
        end = state.tokenizer.eos_token_id
        state.sampling_params = rollout_sampling(args.recipe, [] if end is None else [end])
        state.aborted = False
        return state


def get_model_url(args: HookArgs, model_name: str = "", endpoint: str = "/generate") -> str:
    """Address of the engine; slimecli serves one model in a run."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


async def generate(args: HookArgs, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """One answer, begun or continued; tokens are those that the engine said."""
    sample = adopted(sample)
    if not sample.tokens:
        tokenizer = GenerateState(args).tokenizer
        sample.tokens = list(tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
    room = sampling_params["max_new_tokens"] - sample.response_length
    if room <= 0:
        sample.status = SampleStatus.TRUNCATED
        return sample
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {**sampling_params, "max_new_tokens": room},
        "return_logprob": True,
    }
    headers = {"X-SMG-Routing-Key": sample.session_id} if sample.session_id else None
    append_reply(sample, await post(get_model_url(args), payload, headers=headers))
    return sample


async def generate_and_rm(
    args: HookArgs, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample:
    """One answer and its score, unless whole groups are scored."""
    async with GenerateState(args).semaphore:
        sample = await generate(args, sample, sampling_params)
    if not args.group_rm and sample.status is not SampleStatus.ABORTED and sample.reward is None:
        sample.reward = await async_rm(args, sample)
    return sample


async def generate_and_rm_group(
    args: HookArgs, group: list[Sample], sampling_params: Mapping[str, Any], evaluation: bool = False
) -> list[Sample]:
    """The same for every sample of a group."""
    return list(await asyncio.gather(*(generate_and_rm(args, s, sampling_params, evaluation) for s in group)))

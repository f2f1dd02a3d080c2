"""A plugin in the style of a multi-agent example: args are copied and written to, several samples of one execution."""

import asyncio
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def ask(args, sample: Sample, prompt: str, key: str) -> Sample:
    part = deepcopy(sample)
    part.prompt = prompt
    part.tokens = args.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": part.tokens, "sampling_params": args.sampling_params, "return_logprob": True}
    output = await post(get_model_url(args, "actor"), payload)
    triples = output["meta_info"]["output_token_logprobs"]
    part.tokens = part.tokens + [t[1] for t in triples]
    part.response_length = len(triples)
    part.rollout_log_probs = [t[0] for t in triples]
    part.response = output["text"]
    part.status = Sample.Status.COMPLETED
    args.results_dict[key].append(part)
    return part


async def generate_with_agents(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    tokenizer = args.tokenizer
    args = deepcopy(args)
    args.sampling_params = sampling_params
    args.tokenizer = tokenizer
    args.results_dict = {"solver": [], "rewriter": []}
    await asyncio.gather(*(ask(args, sample, sample.prompt, "solver") for _ in range(2)))
    await ask(args, sample, sample.prompt + args.results_dict["solver"][0].response, "rewriter")
    samples = args.results_dict["solver"] + args.results_dict["rewriter"]
    rewards = await batched_async_rm(args, samples)
    for part, reward in zip(samples, rewards, strict=True):
        part.reward = reward
    return samples

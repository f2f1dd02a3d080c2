"""A plugin in the style of a search example: a semaphore from a local server's client, and a custom score."""

import asyncio

from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

CONFIG = {"max_turns": 2, "concurrency": 4}
SEMAPHORE = asyncio.Semaphore(CONFIG["concurrency"])


async def generate(args, sample: Sample, sampling_params, evaluation=False) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    assert sampling_params["max_new_tokens"] <= args.rollout_max_response_len
    prompt_text = sample.prompt
    if args.apply_chat_template:
        assert isinstance(prompt_text, str)
    sample.tokens = state.tokenizer(prompt_text, add_special_tokens=False)["input_ids"]
    for turn in range(CONFIG["max_turns"]):
        output = await post(
            url,
            {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True},
            headers={"X-SMG-Routing-Key": sample.session_id or "s"},
        )
        triples = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[t[1] for t in triples],
            log_probs=[t[0] for t in triples],
            trainable=True,
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if turn:
            break
        async with SEMAPHORE:
            found = "<information>Paris</information>"
        ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=found)
    assert sample.status != sample.Status.PENDING
    sample.metadata["evaluation"] = evaluation
    return sample


def reward_func(args, sample, **kwargs):
    _, _, recall = f1_score(sample.response, sample.label["ground_truth"]["target"][0])
    return recall

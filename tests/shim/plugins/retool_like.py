"""A plugin in the style of a code-tool example: turns by hand, loss masks, tool output that is not trained on."""

from typing import Any

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample
from slime_test_tools import lazy_status, run_tool

MAX_TURNS = 2


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_masks, log_probs = "", [], [], []
    for turn in range(MAX_TURNS):
        payload = {"input_ids": prompt_ids + response_ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        said = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        response += output["text"]
        response_ids += said
        loss_masks += [1] * len(said)
        if turn == MAX_TURNS - 1:
            break
        heard = run_tool(output["text"])
        heard_ids = state.tokenizer(heard, add_special_tokens=False)["input_ids"]
        response += heard
        response_ids += heard_ids
        loss_masks += [0] * len(heard_ids)
        log_probs += [0.0] * len(heard_ids)
        sample.tool_call_count = getattr(sample, "tool_call_count", 0) + 1
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_masks
    sample.rollout_log_probs = log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = lazy_status("COMPLETED")
    return sample


async def reward_func(args, sample, **kwargs) -> dict[str, Any]:
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    from slime.rollout.rm_hub.math_dapo_utils import compute_score

    result = compute_score(sample.response, sample.label["ground_truth"], strict_box_verify=True)
    result["score"] += 0.1 * getattr(sample, "tool_call_count", 0)
    result["pred"] = result["pred"] if result.get("pred") is not None else ""
    return result

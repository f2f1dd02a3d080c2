"""Tokens per second of the embedded engine against transformers' generate, and against what the machine could do.

    python -m benchmarks.decode [--shape quickstart --shape tiny ...] [--threads 1] [--device auto]

Same model folder, same prompts, same number of answers and tokens, sampled at temperature 1; both sides return the
log-probability of every sampled token. The engine is asked as the rollout asks it: one request per prompt, all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import _common, _throughput
from benchmarks._models import SHAPES, Shape, make_model, random_prompts
from benchmarks._roofline import Limits, matmul_seconds


def engine_side(folder: Path, shape: Shape, threads: int, dtype: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """(generate everything once, close) for the embedded engine."""
    from slimecli.engines import open_engine
    from slimecli.recipe import validate_recipe

    context = shape.prompt_tokens + shape.new_tokens
    engine_section = {
        "slots": shape.prompts * shape.group, "threads": threads, "max_context": context, "dtype": dtype,
    }  # fmt: skip
    recipe = validate_recipe({"engine": engine_section, "model": {"path": str(folder), "source": "path"}})
    engine = open_engine(recipe, folder)
    runner = asyncio.Runner()
    prompts = random_prompts(shape)
    sampling = {"temperature": 1.0, "max_new_tokens": shape.new_tokens, "ignore_eos": True}
    payloads = [
        {
            "input_ids": [prompt] * shape.group,
            "sampling_params": [{**sampling, "sampling_seed": 1000 * i + j} for j in range(shape.group)],
            "return_logprob": True,
        }
        for i, prompt in enumerate(prompts)
    ]

    async def ask() -> None:
        replies = await asyncio.gather(*(engine.generate(p) for p in payloads))
        lengths = {len(r["meta_info"]["output_token_logprobs"]) for group in replies for r in group}
        assert lengths == {shape.new_tokens}, f"the engine answered with {lengths} tokens"

    def close() -> None:
        runner.run(engine.close())
        runner.close()

    return lambda: runner.run(ask()), close


def transformers_side(folder: Path, shape: Shape, device: str, dtype: Any) -> dict[str, Callable[[], None]]:
    """generate() with and without the log-probabilities of the sampled tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    prompts = [p for p in random_prompts(shape) for _ in range(shape.group)]
    ids = torch.tensor(prompts, device=device)
    options = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
        "max_new_tokens": shape.new_tokens,
        "eos_token_id": None, "pad_token_id": 0,
        "return_dict_in_generate": True,
    }  # fmt: skip

    @torch.no_grad()
    def with_log_probs() -> None:
        out = model.generate(ids, output_logits=True, **options)
        new = out.sequences[:, ids.shape[1] :]
        assert new.shape[1] == shape.new_tokens
        for position, logits in enumerate(out.logits):
            torch.log_softmax(logits.float(), -1).gather(-1, new[:, position, None])

    @torch.no_grad()
    def plain() -> None:
        model.generate(ids, **options)

    return {"transformers": with_log_probs, "transformers, no log-probs": plain}


def measure(name: str, shape: Shape, flags: Any, limits: Limits, where: Path) -> dict[str, Any]:
    """All sides on one shape."""
    import torch

    device = flags.device
    dtype = "bfloat16" if device == "cuda" else "float32"
    folder = make_model(where / name, shape, dtype=dtype)
    ask, close = engine_side(folder, shape, flags.threads, dtype)
    sides = {"slime": ask, **transformers_side(folder, shape, device, getattr(torch, dtype))}
    timings = _common.interleave(sides, flags.repeats)
    close()
    rows, tokens = shape.prompts * shape.group, shape.prompts * shape.group * shape.new_tokens
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    products = matmul_seconds(shape, rows, device, getattr(torch, dtype))
    context = shape.prompt_tokens + shape.new_tokens / 2
    step = limits.seconds(shape.flops(rows, context), size * (shape.matmul_params + rows * context * shape.kv_values))
    prefill = shape.flops(shape.prompts * shape.prompt_tokens, shape.prompt_tokens / 2)
    ideal = prefill / limits.flops_per_s + shape.new_tokens * step
    result = _throughput.compare(timings, tokens, "transformers")
    ours = result["sides"]["slime"]["tokens_per_s"]
    flops_done = prefill + shape.flops(tokens, context)
    return result | {
        "shape": name, "rows": rows, "prompt_tokens": shape.prompt_tokens, "new_tokens": shape.new_tokens,
        "dtype": dtype, "device": device, "tokens": tokens,
        "roofline_tokens_per_s": tokens / ideal, "roofline_share": ours * ideal / tokens,
        "matmul_tokens_per_s": rows / products, "matmul_share": ours * products / rows,
        "model_flops_utilisation": flops_done * ours / tokens / limits.flops_per_s,
    }  # fmt: skip


def main() -> None:
    """Measure the shapes asked for."""
    flags = _throughput.parse("embedded engine against transformers generate and against the roofline", SHAPES)
    usual = _throughput.GPU_SHAPES if flags.device == "cuda" else ("quickstart", "tiny", "0.6b")
    shapes = {name: SHAPES[name] for name in (flags.shape or usual)}
    if flags.smoke:
        shapes = {"quickstart": replace(SHAPES["quickstart"], prompts=2, group=2, new_tokens=4)}
    results, limits = _throughput.run(flags, shapes, measure)
    tell(results, limits)
    _throughput.finish("decode", flags, "transformers generate, log-probs on", results, limits)


def tell(results: list[dict[str, Any]], limits: Limits) -> None:
    """The tables."""
    peak, stream = limits.flops_per_s / 1e9, limits.bytes_per_s / 1e9
    _common.say(f"this machine: {peak:.0f} GFLOP/s dense product, {stream:.1f} GB/s copy")
    for result in results:
        rows = [{"side": name, **values} for name, values in result["sides"].items()]
        rows.append({"side": "its weight products alone", "tokens_per_s": result["matmul_tokens_per_s"]})
        rows.append({"side": "roofline", "tokens_per_s": result["roofline_tokens_per_s"]})
        _common.show(
            f"{result['shape']}: {result['rows']} answers x {result['new_tokens']} tokens, {result['dtype']}: "
            f"slime is {result['ratio']:.2f}x transformers (CPU time {result['ratio_cpu']:.2f}x), "
            f"{result['matmul_share']:.0%} of the weight products, {result['roofline_share']:.0%} of the roofline",
            rows,
        )


if __name__ == "__main__":
    main()

"""Tokens trained per second by a trainer, FSDP or Megatron, against a plain padded transformers loop.

    python -m benchmarks.train_throughput [--shape quickstart --shape tiny ...] [--threads 1] [--device auto]
        [--backend fsdp|megatron]

Same weights, same samples (groups that share a prompt, answers of different lengths), same GRPO loss, same optimizer.
The loop pads every micro-batch to its longest sample and holds the full logits. Tokens are counted without padding,
and the gradient norms of the first step must agree: both sides do the same job.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import _common, _throughput
from benchmarks._models import SHAPES, Shape, make_model
from benchmarks._roofline import Limits
from slimecli.types import Group, Sample, SampleStatus


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one optimizer step trains on."""

    prompts: int
    group: int
    prompt_tokens: int
    shortest: int
    """tokens of the shortest answer"""
    longest: int
    """tokens of the longest answer; lengths are uniform in between"""
    budget: int
    """tokens of a micro-batch, padding included on the side that pads"""


WORKS: dict[str, Work] = {
    "quickstart": Work(prompts=32, group=8, prompt_tokens=14, shortest=4, longest=24, budget=16384),
    "tiny": Work(prompts=8, group=8, prompt_tokens=32, shortest=8, longest=128, budget=4096),
    "0.6b": Work(prompts=2, group=4, prompt_tokens=32, shortest=8, longest=64, budget=1024),
    "0.6b-gpu": Work(prompts=32, group=8, prompt_tokens=512, shortest=128, longest=2048, budget=32768),
    "4b-gpu": Work(prompts=8, group=8, prompt_tokens=512, shortest=128, longest=2048, budget=16384),
}


def make_groups(work: Work, seed: int = 0) -> list[Group]:
    """Random groups; rewards differ inside a group so that there is something to learn."""
    rng = random.Random(seed)
    groups: list[Group] = []
    for g in range(work.prompts):
        prompt = [rng.randrange(3, 250) for _ in range(work.prompt_tokens)]
        group = []
        for i in range(work.group):
            length = rng.randint(work.shortest, work.longest)
            sample = Sample(
                group_index=g,
                index=g * work.group + i,
                tokens=prompt + [rng.randrange(3, 250) for _ in range(length)],
                response_length=length,
                reward=float(i % 2),
                status=SampleStatus.COMPLETED,
            )
            group.append(sample)
        groups.append(group)
    return groups


def slime_side(folder: Path, batch: Any, work: Work, flags: Any, dtype: str) -> tuple[Callable[[], float], Any]:
    """(one optimizer step -> gradient norm, the trainer)."""
    from slimecli.recipe import validate_recipe
    from slimecli.trainers import open_trainer

    trainer_section = {"max_tokens_per_micro_batch": work.budget, "threads": flags.threads, "lr": 1e-5}
    trainer_section["backend"] = flags.backend
    model = {"path": str(folder), "source": "path", "dtype": dtype}
    trainer = open_trainer(validate_recipe({"trainer": trainer_section, "model": model}), folder, total_steps=1000)
    return lambda: trainer.step(batch).grad_norm, trainer


def padded_side(folder: Path, batch: Any, work: Work, device: str, dtype: str) -> Callable[[], float]:
    """One optimizer step of the loop that everybody writes first; returns the gradient norm."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    bounds = batch.cu_seqlens.tolist()
    pieces = [slice(a, b) for a, b in itertools.pairwise(bounds)]

    def padded(values: torch.Tensor, rows: list[slice]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([values[r] for r in rows], batch_first=True).to(device)

    micro = max(1, work.budget // (work.prompt_tokens + work.longest))
    autocast = torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")

    def step() -> float:
        for start in range(0, len(pieces), micro):
            rows = pieces[start : start + micro]
            ids, targets = padded(batch.tokens, rows), padded(batch.targets, rows)
            mask = padded(torch.ones(len(batch.tokens)), rows)
            with autocast:
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            picked = torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None])[..., 0]
            ratio = torch.exp(picked - picked.detach())
            advantages, weight = padded(batch.advantages, rows), padded(batch.loss_weight, rows)
            clipped = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
            (clipped * weight).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step


def make_batch(work: Work) -> Any:
    """A TrainBatch as the loop hands it to the trainer."""
    from slimecli.algos import algorithm
    from slimecli.batch import from_groups, weigh
    from slimecli.recipe_algo import AlgoSection

    batch = from_groups(make_groups(work), temperature=1.0)
    batch = batch.replace(advantages=algorithm("grpo").advantages(batch, AlgoSection()))
    return weigh(batch, "sample")


def measure(name: str, work: Work, flags: Any, limits: Limits, where: Path) -> dict[str, Any]:
    """Both sides on one shape. A large one goes one after the other: two sets of optimizer state need not fit."""
    import torch

    device = flags.device
    dtype = "bfloat16" if device == "cuda" else "float32"
    shape: Shape = SHAPES[name]
    folder = make_model(where / name, shape, dtype=dtype)
    batch = make_batch(work)
    tokens = int(batch.num_tokens)
    ours, trainer = slime_side(folder, batch, work, flags, dtype)
    norms = {"slime": ours()}
    peak = 0
    if shape.matmul_params > 1e8:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # of a step, not of loading
        timings = _common.interleave({"slime": ours}, flags.repeats)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        trainer.close()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        theirs = padded_side(folder, batch, work, device, dtype)
        norms["padded"] = theirs()
        timings |= _common.interleave({"padded": theirs}, flags.repeats)
    else:
        theirs = padded_side(folder, batch, work, device, dtype)
        norms["padded"] = theirs()
        timings = _common.interleave({"slime": ours, "padded": theirs}, flags.repeats)
        trainer.close()
    check_same_job(norms, 2e-2 if dtype == "bfloat16" else 1e-3)
    result = _throughput.compare(timings, tokens, "padded")
    span = float((batch.lengths.double() ** 2).sum() / batch.lengths.sum()) / 2
    flops = shape.flops(tokens, span, backward=True)
    return result | {
        "shape": name, "device": device, "dtype": dtype, "samples": work.prompts * work.group, "tokens": tokens,
        "backend": flags.backend, "gradient_norms": norms, "peak_device_bytes": peak,
        "model_flops_utilisation": flops / result["sides"]["slime"]["seconds"] / limits.flops_per_s,
    }  # fmt: skip


def check_same_job(norms: dict[str, float], tolerance: float) -> None:
    """Stop when the two sides do not compute the same gradient: their speeds would not be comparable."""
    a, b = norms["slime"], norms["padded"]
    if abs(a - b) > tolerance * max(a, b):
        raise SystemExit(f"gradient norms differ: slime {a:.6g}, padded loop {b:.6g}; the two do not do the same job")


def main() -> None:
    """Measure the shapes asked for."""
    flags = _throughput.parse(
        "a trainer against a padded transformers loop", WORKS, repeats=5, backend=("fsdp", "megatron")
    )
    usual = _throughput.GPU_SHAPES if flags.device == "cuda" else ("quickstart", "tiny")
    works = {name: WORKS[name] for name in (flags.shape or usual)}
    if flags.smoke:
        works = {"quickstart": replace(WORKS["quickstart"], prompts=2, group=4)}
    results, limits = _throughput.run(flags, works, measure)
    for result in results:
        title = (
            f"{result['shape']}: {result['samples']} samples, {result['tokens']} tokens: slime is "
            f"{result['ratio']:.2f}x the padded loop, {result['model_flops_utilisation']:.0%} of the product peak"
        )
        _common.show(title, [{"side": side, **values} for side, values in result["sides"].items()])
    name = "train_throughput" if flags.backend == "fsdp" else f"train_throughput_{flags.backend}"
    _throughput.finish(name, flags, "padded transformers loop", results, limits)


if __name__ == "__main__":
    main()

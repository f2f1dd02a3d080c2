"""The quickstart recipe shrunk to seconds, and what two equal runs must share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slimecli import files
from slimecli.types import Sample

TINY = (
    "data.count=300",
    "data.holdout=16",
    "sft.steps=6",
    "sft.batch_size=16",
    "sft.warmup_steps=1",
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_response_tokens=8",
    "trainer.global_batch_size=16",
    "trainer.warmup_steps=1",
    "engine.slots=16",
    "eval.interval=0",
    "checkpoint.interval=1",
    "checkpoint.keep=10",
    "cluster.backend='local'",
    "reward.path='tests.tiny_run:even_share'",
)
"""a model of six SFT steps solves nothing; the reward is one that every answer differs in"""


async def even_share(args: object, sample: Sample, **kwargs: object) -> float:
    """Share of even token ids among the response tokens."""
    response = sample.tokens[sample.prompt_length :]
    return sum(t % 2 == 0 for t in response) / max(len(response), 1)


def sets(*extra: str) -> list[str]:
    """--set arguments: TINY, then the extra ones."""
    return [word for item in (*TINY, *extra) for word in ("--set", item)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an HF folder."""
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def assert_same_weights(a: Path, b: Path) -> None:
    """Bit for bit."""
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys() and left
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"{a} and {b} differ in {different}"


def metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_steps(a: Path, b: Path, steps: int) -> None:
    """Samples, metrics and weights of two runs are byte-identical."""
    for step in range(1, steps + 1):
        name = f"rollouts/step_{step:06d}.jsonl.zst"
        assert (a / name).read_bytes() == (b / name).read_bytes(), f"samples of step {step} differ"
    assert metrics(a) == metrics(b)
    assert_same_weights(a / f"weights/v{steps:06d}", b / f"weights/v{steps:06d}")


def assert_same_run(a: Path, b: Path, steps: int) -> None:
    """Samples, metrics, weights and checkpoints of two runs are byte-identical."""
    assert_same_steps(a, b, steps)
    assert all(r["train/grad_norm"] > 0 for r in metrics(a) if "train/grad_norm" in r), "nothing was learnt"
    left, right = (r / f"checkpoints/step_{steps:06d}" for r in (a, b))
    assert files.sha256(left) == files.sha256(right), "checkpoints differ"

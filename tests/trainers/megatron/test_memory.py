"""What `slime plan` says a Megatron process takes, against what live ranks take at the peak of a step.

Measured is the resident memory of each rank, with an allocator that gives freed memory back at once. (Megatron-LM has a
report of its own, `report_theoretical_memory`; the megatron-core wheel has not. Its formulas are in test_shares.py.)
"""

from __future__ import annotations

import ctypes
import gc
import random
from pathlib import Path

import pytest

from slimecli.batch import TrainBatch, from_groups
from slimecli.files import read_json
from slimecli.model_specs import from_config
from slimecli.plan_megatron import megatron_bytes
from slimecli.recipe import Recipe
from slimecli.trainers import open_trainer
from slimecli.types import Sample
from tests.models import tiny_model
from tests.trainers import made
from tests.trainers.megatron.ranks import megatron, world_of
from tests.trainers.processes import run_ranks

SIZE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
RECIPE = (
    *("trainer.max_tokens_per_micro_batch=1024", "data.max_prompt_tokens=256", "rollout.max_response_tokens=256"),
    *("trainer.global_batch_size=4", "rollout.batch_size=1", "rollout.n_samples_per_prompt=4"),
)
TP2, PP2 = (f"{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model"))
EP2, SP, FULL = "expert_model_parallel_size=2", "sequence_parallel=true", "trainer.activation_checkpointing=true"
CASES = {
    "one": ("qwen3", megatron()),
    "recomputed": ("qwen3", (*megatron(), FULL)),
    "reference": ("qwen3", (*megatron(), "algo.kl_coef=0.1")),
    "critic": ("qwen3", (*megatron(), "algo.name=ppo")),
    "critic in turns": ("qwen3", (*megatron(), "algo.name=ppo", "algo.critic_offload=true")),
    "TP2": ("qwen3", megatron(TP2, SP, processes=2)),
    "PP2": ("qwen3", megatron(PP2, processes=2)),
    "EP2": ("qwen3_moe", megatron(EP2, processes=2)),
}


@pytest.fixture(scope="module")
def wide_of(tmp_path_factory):
    """Models whose numbers outweigh what Python itself takes."""
    found: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in found:
            more = {"moe_intermediate_size": 256, "num_experts": 8} if "moe" in family else {"intermediate_size": 768}
            found[family] = tiny_model(tmp_path_factory.mktemp(family), family, vocab=6144, **SIZE, **more)
        return found[family]

    return make


def full_batch(recipe: Recipe) -> TrainBatch:
    """As long as the plan reckons with."""
    rng, tokens = random.Random(0), recipe.max_context
    group = [
        Sample(tokens=[rng.randrange(300) for _ in range(tokens)], response_length=tokens // 2, reward=float(i))
        for i in range(recipe.trainer.global_batch_size)
    ]
    batch = made.ready(from_groups([group], temperature=1.0), made.recipe())
    return batch.replace(returns=batch.advantages, values=batch.advantages * 0)


def resident(what: str) -> int:
    """Bytes: VmRSS now, or VmHWM at most since `clear_refs`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def peak_of_a_step(folder: Path, options: tuple[str, ...]) -> int:
    """Bytes on one rank, beyond what there was before the trainer was opened."""
    libc = ctypes.CDLL("libc.so.6")
    assert libc.mallopt(-3, 1 << 16), "M_MMAP_THRESHOLD: what is large is the system's again once it is freed"
    recipe = made.recipe(*options)
    batch = full_batch(recipe)
    gc.collect()
    libc.malloc_trim(0)  # what the tests before this one freed, and the fork brought along, would be used first
    before = resident("VmRSS")
    trainer = open_trainer(recipe, folder, total_steps=5)
    if recipe.algo.kl_coef:
        batch = batch.replace(ref_log_probs=trainer.log_probs(batch, "reference"))
    trainer.step(batch)
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    if recipe.algo.kl_coef:
        trainer.log_probs(batch, "reference")
    trainer.step(batch)
    return resident("VmHWM") - before


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_near_the_measured_peak(wide_of, case):
    """Never far below: a plan that says too little is what hurts. It adds up what need not be there at one time: with
    recomputation, the logits of the last layer and the activations of one that is computed again."""
    family, layout = CASES[case]
    options, folder = (*RECIPE, *layout), wide_of(family)
    measured = max(run_ranks(world_of(layout), peak_of_a_step, folder, options, join=False))
    spec = from_config(read_json(folder / "config.json"))
    values = {v.name: v.value for v in megatron_bytes(made.recipe(*options), spec, on_gpu=False)}
    planned = values["total"] - values["libraries"]
    assert measured > 150e6
    assert 0.85 * measured < planned < 1.5 * measured, (round(planned / 1e6), round(measured / 1e6), values)

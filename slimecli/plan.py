"""recipe x model x machine -> Plan: everything that is wrong, and what it will take. Neither torch nor Ray here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slimecli import env
from slimecli.errors import RecipeError
from slimecli.frozen import with_copies
from slimecli.placement import settled
from slimecli.plan_algo import algorithm_warnings
from slimecli.plan_checks import all_problems, count_data
from slimecli.plan_gpus import GPU_MEMORY, gpu_demand, gpu_problems, gpu_values
from slimecli.plan_machine import Machine, measure, runs_on_gpus, this_machine
from slimecli.plan_megatron import decided_values, megatron_bytes
from slimecli.plan_numbers import (
    Value,
    disk_bytes,
    engine_bytes,
    phase_values,
    placement_values,
    time_values,
    total_of,
    trainer_bytes,
    work_values,
)
from slimecli.plan_rollout import rollout_warnings
from slimecli.plan_sglang import sglang_values, sglang_warnings
from slimecli.plan_spec import copies_bytes, model_spec
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will take on this machine."""

    values: list[Value]
    """in the order in which they are shown"""
    warnings: list[str]
    """what will be slow or tight, though nothing is wrong"""

    def value(self, group: str, name: str) -> float | int | str:
        """One number by group and name."""
        return next(v.value for v in self.values if (v.group, v.name) == (group, name))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"values": [asdict(v) for v in self.values], "warnings": self.warnings}


def check_recipe(recipe: Recipe, run: RunDir | None = None) -> None:
    """Raise RecipeError with every problem the recipe has, its needs on this machine included."""
    make_plan(recipe, run=run)


def make_plan(recipe: Recipe, *, run: RunDir | None = None, measured: bool = False) -> Plan:
    """The plan of a recipe.

    Args:
        run: an existing run that is to be continued; its own model and data are looked at first.
        measured: also measure this machine's arithmetic and estimate the time (seconds, in a child process).

    Raises RecipeError with every problem at once.
    """
    given, recipe = recipe, recipe if run is None else with_copies(recipe, run)
    problems = all_problems(recipe, run)
    if problems:
        raise RecipeError(problems)
    copies = copies_bytes(given, run)
    machine = this_machine(run.root if run is not None else env.runs_root())
    spec = model_spec(recipe, run)
    on_gpu = runs_on_gpus(recipe, machine.gpus)
    is_megatron = recipe.trainer.backend == "megatron"
    trainer = (megatron_bytes if is_megatron else trainer_bytes)(recipe, spec, on_gpu=on_gpu)
    engine = engine_bytes(recipe, spec, on_gpu)
    disk = disk_bytes(recipe, spec, copies)
    needs_engine = recipe.steps > 0 and not recipe.engine.urls
    engines = recipe.engine.replicas if needs_engine else 0
    phases = phase_values(recipe, spec, trainer, engine, engines)
    values = [
        *work_values(recipe, count_data(recipe)),
        *trainer,
        *(engine if needs_engine else []),
        *phases,
        *disk,
        *placement_values(recipe, machine, recipe.sync_kind(recipe.cluster.backend)),
        *gpu_values(recipe, machine.gpus, trainer, engine, spec),
        *(decided_values(recipe, spec, on_gpu=on_gpu) if is_megatron else []),
        *sglang_values(settled(recipe, gpu_demand(recipe, machine.gpus)), on_gpu=on_gpu),
    ]
    memory = max(int(v.value) for v in phases)
    # the estimated part may be off by a factor, so it can warn but not refuse
    estimated = sum(int(v.value) for v in trainer if "estimated" in v.name) * recipe.trainer.processes
    problems = machine_problems(machine, 0 if on_gpu else memory - estimated, total_of(disk), run)
    problems += gpu_problems(recipe, machine.gpus)
    problems += shared_memory_problems(recipe, machine, spec.weight_bytes(recipe.model.dtype))
    if problems:
        raise RecipeError(problems)
    if measured:
        slots = min(recipe.engine.slots, recipe.rollout.batch_size * recipe.rollout.n_samples_per_prompt)
        values += time_values(recipe, spec, measure(spec.hidden, slots))
    found = warnings(recipe, machine, engines) + sglang_warnings(recipe, on_gpu=on_gpu)
    found += device_warnings(recipe, machine, max((int(v.value) for v in values if v.group == GPU_MEMORY), default=0))
    if not on_gpu and memory > machine.memory_bytes:
        found.append(
            f"about {memory / 1e9:.1f} GB of memory may be needed, {machine.memory_bytes / 1e9:.1f} GB are free: "
            "a lower trainer.max_tokens_per_micro_batch takes less"
        )
    return Plan(values=values, warnings=found)


def machine_problems(machine: Machine, memory: int, disk: int, run: RunDir | None) -> list[str]:
    """What this machine cannot hold at all.

    Args:
        memory: 0 where GPUs hold it, those of a cluster included: what they free is not known here.
    """
    problems = []
    already = sum(p.stat().st_size for p in run.root.rglob("*") if p.is_file()) if run is not None else 0
    if disk - already > machine.disk_free_bytes:
        problems.append(
            f"the run needs about {disk / 1e9:.3g} GB of disk, {machine.disk_free_bytes / 1e9:.3g} GB are free; lower "
            "checkpoint.keep, or move the runs with SLIME_RUNS"
        )
    if memory > machine.memory_bytes:
        problems.append(
            f"trainer and engines need about {memory / 1e9:.1f} GB of memory, {machine.memory_bytes / 1e9:.1f} GB are "
            "free; lower engine.slots, or take a smaller model"
        )
    return problems


def shared_memory_problems(recipe: Recipe, machine: Machine, published: int) -> list[str]:
    """Weights that cannot pass through /dev/shm. Docker gives 64 MB of it unless told otherwise."""
    if not recipe.steps or recipe.sync_kind(recipe.cluster.backend) not in ("shared_memory", "tensor"):
        return []
    if published <= machine.shared_memory_bytes:
        return []
    return [
        f"the weights take {published / 1e9:.2f} GB on their way to the engines, /dev/shm has "
        f"{machine.shared_memory_bytes / 1e9:.2f} GB free; give it more (docker run --shm-size=...), or "
        "--set sync.kind=disk"
    ]


def device_warnings(recipe: Recipe, machine: Machine, on_device: int) -> list[str]:
    """More than a GPU has, or less on it than could be.

    Args:
        on_device: bytes that one GPU has to hold at a time.
    """
    offloads = recipe.algo.name == "ppo" and recipe.algo.critic_offload
    if offloads and not runs_on_gpus(recipe, machine.gpus):
        return ["algo.critic_offload frees memory of a GPU; without one it only copies"]
    if not machine.gpus or on_device <= machine.gpu_memory_bytes:
        return []
    can_offload = recipe.trainer.backend == "megatron" and recipe.algo.name == "ppo" and not offloads
    return [
        f"about {on_device / 1e9:.1f} GB of GPU memory may be needed at a time, the smallest GPU has "
        f"{machine.gpu_memory_bytes / 1e9:.1f} GB: more trainer.processes, a lower "
        "trainer.max_tokens_per_micro_batch or fewer engine.slots take less"
        + ", and so does algo.critic_offload = true"
        * can_offload
    ]


def warnings(recipe: Recipe, machine: Machine, engines: int) -> list[str]:
    """What deserves a look."""
    found = algorithm_warnings(recipe) + rollout_warnings(recipe)
    threads = recipe.trainer.processes * recipe.trainer.threads + engines * recipe.engine.threads
    # where trainer and engines take turns, only the larger of the two has to fit
    busiest = max(recipe.trainer.processes * recipe.trainer.threads, engines * recipe.engine.threads)
    busiest = threads if recipe.rollout.overlaps else busiest
    if recipe.cluster.address and not machine.gpus:
        found.append("this machine has no GPU: the numbers are for a cluster of GPUs, which only the run will see")
    if busiest > machine.cpus and not runs_on_gpus(recipe, machine.gpus):
        found.append(f"{threads} threads on {machine.cpus} processors: they will wait for each other")
    if recipe.rollout.top_p < 1 or recipe.rollout.top_k > 0 or recipe.rollout.min_p > 0:
        found.append("rollout.top_p, top_k or min_p cut the distribution: the trainer's policy ratio is biased")
    if recipe.trainer.max_tokens_per_micro_batch < recipe.max_context:
        found.append(
            f"trainer.max_tokens_per_micro_batch {recipe.trainer.max_tokens_per_micro_batch} is below one full sample "
            f"({recipe.max_context} tokens): a long sample makes a micro-batch of its own, over the budget"
        )
    if recipe.gates.action == "warn":
        found.append("gates.action = 'warn': a broken gate will not stop the run")
    return found

"""The tables of docs/megatron.md are what the code does. After a change that is meant:

python -m tests.test_docs_megatron
"""

import re
from pathlib import Path

import pytest

from slimecli.model_specs import get_spec
from slimecli.plan_megatron import megatron_bytes
from slimecli.recipe import load_recipe
from slimecli.trainers.megatron.arguments import DEFAULTS, NEEDS_TRANSFORMER_ENGINE, settings_of

PAGE = Path(__file__).parents[1] / "docs" / "megatron.md"
LAYOUTS = (
    ("qwen3-0.6b", 1, {}),
    ("qwen3-1.7b", 1, {}),
    ("qwen3-4b", 2, {"tp": 2}),
    ("qwen3-8b", 8, {"tp": 2}),
    ("qwen3-14b", 8, {"tp": 4}),
    ("qwen3-32b", 16, {"tp": 8}),
    ("qwen3-30b-a3b", 16, {"tp": 4, "ep": 8, "etp": 1}),
    ("qwen3-235b-a22b", 128, {"tp": 4, "pp": 4, "ep": 16, "etp": 1, "last": 22}),
)
FLAGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "last": "decoder_last_pipeline_num_layers",
}


def recipe_of(processes, sizes, *more):
    given = {FLAGS[k]: v for k, v in sizes.items()} | ({"sequence_parallel": "true"} if sizes.get("tp") else {})
    numbers = ("rollout.max_response_tokens=7168", "trainer.max_tokens_per_micro_batch=8192")
    common = ("trainer.backend=megatron", f"trainer.processes={processes}", "trainer.activation_checkpointing=true")
    return load_recipe("", (*common, *numbers, *(f"megatron.{k}={v}" for k, v in given.items()), *more))


def layouts():
    yield "| model | GPUs | layout | weights | gradients | optimizer | activations | logits | in all |"
    yield "|---|---|---|---|---|---|---|---|---|"
    names = ("weights", "gradients", "optimizer", "activations, estimated", "logits", "total")
    for name, processes, sizes in LAYOUTS:
        spec, recipe = get_spec(name), recipe_of(processes, sizes)
        values = {v.name: v.value for v in megatron_bytes(recipe, spec, on_gpu=True)}
        values["total"] -= values["libraries"]
        said = " ".join(f"{k.upper()}{v}" for k, v in sizes.items() if k != "last")
        said += f", last stage {sizes['last']} layers" if "last" in sizes else ""
        cells = [f"{values.get(n, 0) / 1e9:.1f}" for n in names]
        yield f"| {name} | {processes} | {said or 'DP'} | {' | '.join(cells)} |"


def critic():
    yield "| `algo.critic_offload` | in all on the device | in host memory |"
    yield "|---|---|---|"
    _, processes, sizes = next(row for row in LAYOUTS if row[0] == "qwen3-8b")
    for value in ("false", "true"):
        recipe = recipe_of(processes, sizes, "algo.name=ppo", f"algo.critic_offload={value}")
        values = {
            (v.group.split()[0], v.name): v.value for v in megatron_bytes(recipe, get_spec("qwen3-8b"), on_gpu=True)
        }
        device = values["memory", "total"] - values["memory", "libraries"]
        yield f"| {value} | {device / 1e9:.1f} | {values.get(('host', 'total'), 0) / 1e9:.1f} |"


def forced():
    found = {}
    for when, model, sizes, on_gpu in (
        ("", "qwen3-4b", {}, True),
        ("pipeline", "qwen3-4b", {"pipeline_model_parallel_size": 2}, True),
        (
            "interleaved",
            "qwen3-4b",
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            True,
        ),
        ("experts", "qwen3-30b-a3b", {}, True),
        ("CPU", "qwen3-4b", {}, False),
    ):
        processes = sizes.get("pipeline_model_parallel_size", 1)
        sets = (
            "trainer.backend=megatron",
            f"trainer.processes={processes}",
            *(f"megatron.{k}={v}" for k, v in sizes.items()),
        )
        for name, value, reason in settings_of(load_recipe("", sets), get_spec(model), on_gpu=on_gpu).forced:
            found.setdefault((name, value, reason), when)
    yield "| argument | value | where | reason |"
    yield "|---|---|---|---|"
    merged = {}
    for (name, value, reason), when in found.items():
        merged.setdefault((value if value is None else str(value).lower(), when, reason), []).append(f"`{name}`")
    for (value, when, reason), names in merged.items():
        yield f"| {', '.join(names)} | {value or 'none'} | {when or 'everywhere'} | {reason} |"


def defaults():
    yield "| argument | value | reason |"
    yield "|---|---|---|"
    for name, value, reason in DEFAULTS:
        yield f"| `{name}` | {str(value).lower()} | {reason} |"


def made():
    """The page with its tables as they must be."""
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in (("layouts", layouts), ("critic", critic), ("forced", forced), ("defaults", defaults)):
        table = "\n".join(rows())
        text = re.sub(
            rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
        )
    words = ", ".join(f"`{n}`" for n in NEEDS_TRANSFORMER_ENGINE)
    return re.sub(
        r"(<!-- words: transformer-engine -->).*?(<!-- end -->)", lambda m: m[1] + words + m[2], text, flags=re.S
    )


def test_the_page_says_what_the_code_does():
    assert PAGE.read_text(encoding="utf-8") == made(), "python -m tests.test_docs_megatron"


@pytest.mark.parametrize("name", [row[0] for row in LAYOUTS])
def test_every_recommended_layout_is_legal_and_fits_a_gpu_of_80_gb(name):
    _, processes, sizes = next(row for row in LAYOUTS if row[0] == name)
    values = {v.name: v.value for v in megatron_bytes(recipe_of(processes, sizes), get_spec(name), on_gpu=True)}
    assert values["total"] < 72e9, {k: v / 1e9 for k, v in values.items()}


if __name__ == "__main__":
    PAGE.write_text(made(), encoding="utf-8")

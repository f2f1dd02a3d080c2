"""Imports go down, or sideways within one layer."""

import sys

from tests.architecture.sources import library_files, module_name, top_imports

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "types", "model_specs"),
    (
        "compat",
        "data_tools",
        "recipe",
        "recipe_algo",
        "recipe_engine",
        "recipe_reward",
        "recipe_rollout",
        "recipe_sections",
        "recipe_tools",
        "recipe_live",
        "rundir",
        "protocols",
        "console",
        "env",
        "files",
        "seeds",
        "static",
        "lookup",
        "samples",
        "headers",
        "flags",
        "ports",
        "placement",
        "topology",
        "frozen",
    ),
    ("algos", "batch"),
    (
        "engines",
        "trainers",
        "sync",
        "cluster",
        "weights",
        "rollout",
        "shim",
        "tools",
        "agents",
        "serving",
        "observe",
        "clock",
    ),
    (
        "loop",
        "stage",
        "step_metrics",
        "session",
        "recording",
        "publishing",
        "pipeline",
        "plan",
        "plan_algo",
        "plan_reward",
        "plan_sglang",
        "plan_rollout",
        "plan_checks",
        "plan_gpus",
        "plan_layout",
        "plan_machine",
        "plan_megatron",
        "plan_numbers",
        "plan_source",
        "plan_spec",
        "plan_tools",
    ),
    ("commands",),
    ("cli", "__main__"),
)
"""first part of the name below slimecli, lowest layer first"""

HEAVY = ("torch", "transformers", "ray", "sglang", "megatron", "mbridge")
ALLOWED: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"pydantic", "rich"}),
    frozenset({"torch"}),
    frozenset({"torch", "transformers"}),
    frozenset({"torch"}),
    frozenset({"typer"}),
    frozenset({"typer"}),
)
"""third-party packages that a layer may import at module top besides LIGHT; heavy ones are what this is about"""
LIGHT = frozenset(
    {"aiohttp", "numpy", "orjson", "safetensors", "tokenizers", "zstandard", "pyarrow", "huggingface_hub", "isal"}
)
LIGHT_FROM = 2
"""lowest layer in which LIGHT packages may stand at module top; below, and in the two top layers, inside functions"""

IN_FUNCTIONS_ONLY = ("ray", "sglang", "megatron", "mbridge")
AT_TOP_OF = {"megatron": "slimecli.trainers.megatron."}
"""packages that subclasses need at module top, and the one folder where that may be: it is imported on demand"""
COMMAND_TOPS = {"errors", "console", "commands", "protocols"}
"""what a command module may import from slimecli at module top"""
PLAN = (
    "plan",
    "plan_algo",
    "plan_checks",
    "plan_layout",
    "plan_machine",
    "plan_megatron",
    "plan_numbers",
    "plan_reward",
    "plan_sglang",
    "plan_rollout",
    "plan_source",
    "plan_spec",
    "plan_tools",
    "static",
)
FOR_PLAN = (
    *(f"slimecli.trainers.megatron.{name}" for name in ("arguments", "fields", "layout", "refusals", "shares")),
    *(f"slimecli.engines.sglang.{name}" for name in ("arguments", "fields")),
    "slimecli.engines.router.programs",
)
"""modules of layer 3 that plans are made with; they are held to a plan's rule, and so are the packages above them"""


def layer_of(module: str) -> int:
    part = module.split(".")[1] if "." in module else ""
    for number, members in enumerate(LAYERS):
        if part in members:
            return number
    raise AssertionError(f"{module} stands in no layer: add it to LAYERS, and to the table in the design")


def test_every_module_stands_in_a_layer():
    names = [module_name(p) for p in library_files()]
    assert len(names) > 30
    for name in names:
        if name != "slimecli":
            layer_of(name)


def test_imports_go_down_or_sideways():
    wrong = []
    for path in library_files():
        name = module_name(path)
        if name == "slimecli":
            assert top_imports(path) == []
            continue
        for target in top_imports(path):
            if target.startswith("slimecli.") and not _is_attribute(target) and layer_of(target) > layer_of(name):
                wrong.append(f"{name} (layer {layer_of(name)}) imports {target} (layer {layer_of(target)})")
    assert wrong == []


def _is_attribute(target: str) -> bool:
    return target in ("slimecli.__version__",)


def test_third_party_packages_stay_in_their_layers():
    wrong = []
    for path in library_files():
        name = module_name(path)
        number = layer_of(name) if name != "slimecli" else 0
        allowed = ALLOWED[number] | ALLOWED[1] if 1 <= number <= 4 else ALLOWED[number]
        allowed |= LIGHT if LIGHT_FROM <= number <= 4 else frozenset()
        for target in top_imports(path):
            root = target.split(".")[0]
            if root in sys.stdlib_module_names or root == "slimecli" or root in allowed or _has_its_place(name, root):
                continue
            wrong.append(f"{name} imports {target} at module top")
    assert wrong == []


def _has_its_place(module: str, package: str) -> bool:
    return package in AT_TOP_OF and module.startswith(AT_TOP_OF[package])


def test_ray_sglang_and_megatron_are_imported_in_functions_only():
    wrong = [
        f"{module_name(p)}: {target}"
        for p in library_files()
        for target in top_imports(p)
        if (root := target.split(".")[0]) in IN_FUNCTIONS_ONLY and not _has_its_place(module_name(p), root)
    ]
    assert wrong == []


def test_plan_needs_neither_torch_nor_a_module_that_does():
    parents = {name.rpartition(".")[0] for name in FOR_PLAN} | {"slimecli.trainers"}
    seen = set()
    for path in library_files():
        name = module_name(path)
        is_plan = name.split(".")[-1] in PLAN and not name.startswith("slimecli.commands")
        if not (is_plan or name in FOR_PLAN or name in parents):
            continue
        seen.add(name)
        for target in top_imports(path):
            assert target.split(".")[0] not in HEAVY, f"{name} imports {target}"
            if target.startswith("slimecli.") and target not in FOR_PLAN:
                assert layer_of(target) not in (2, 3), f"{name} imports {target}"
    assert seen >= set(FOR_PLAN) | parents


def test_command_modules_import_only_light_things_at_the_top():
    wrong = []
    for path in library_files():
        name = module_name(path)
        if not name.startswith("slimecli.commands.") or name == "slimecli.commands._stages":
            continue
        for target in top_imports(path):
            if target.startswith("slimecli.") and target.split(".")[1] not in COMMAND_TOPS:
                wrong.append(f"{name} imports {target}")
    assert wrong == []

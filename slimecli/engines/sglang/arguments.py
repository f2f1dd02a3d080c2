"""Recipe -> the command line of an SGLang server: what the recipe decides, each with its reason, and `[sglang]`.

Names in `[sglang]` are SGLang's flags, with dashes or underscores. They are checked against the installed version, and
passed on as they are: speculative decoding, deterministic inference and everything else that the server offers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimecli.engines.sglang.fields import Argument, argument_name, installation, known_arguments
from slimecli.errors import UsageError, nearest
from slimecli.recipe import Recipe
from slimecli.static import annotation_fits, annotation_said

OWNED = {
    "model_path": "model.path",
    "tokenizer_path": "the run's model",
    "host": "engine.host",
    "port": "slime, which takes a free one",
    "nccl_port": "slime, which takes a free one",
    "nnodes": "cluster.gpus_per_machine",
    "node_rank": "cluster.gpus_per_machine",
    "dist_init_addr": "slime, which knows the machines",
    "base_gpu_id": "slime, which gives each server its GPUs",
    "gpu_id_step": "slime, which gives each server its GPUs",
    "random_seed": "seed",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "engine.dtype",
    "context_length": "engine.max_context",
    "max_running_requests": "engine.slots",
    "weight_version": "slime, which counts the versions",
    "api_key": "engine.api_key_env",
    "admin_api_key": "engine.api_key_env",
    "config": "[sglang] itself",
    "device": "the machine: CPU without a GPU",
    "smg_grpc_mode": "slime, which speaks HTTP",
    "grpc_mode": "slime, which speaks HTTP",
    "skip_tokenizer_init": "slime, which needs the text of answers",
    "use_ray": "cluster.backend",
}
"""argument -> who says it"""
ON_CPU: tuple[tuple[str, Any, str], ...] = (
    ("attention_backend", "torch_native", "SGLang's other attention kernels need a GPU, or a CPU build of them"),
    ("sampling_backend", "pytorch", "its sampling kernels need a GPU"),
    ("grammar_backend", "none", "constrained answers need kernels that are not there"),
    ("sleep_on_idle", True, "its scheduler would take a core for itself while it waits for requests"),
    ("disable_overlap_schedule", True, "there is no device whose work could overlap with the scheduler's"),
)
"""(argument, value, reason) without a GPU, unless [sglang] says otherwise"""
_TCP = ("disaggregation_transfer_backend", "mooncake_tcp", "caches go over TCP: there is no InfiniBand")
SPLIT_ON_CPU: Mapping[str, tuple[tuple[str, Any, str], ...]] = {
    "prefill": (_TCP,),
    "decode": (
        _TCP,
        ("disaggregation_decode_retraction_backup", "cpu_tensor", "its other way pins memory for a GPU"),
    ),
}
"""the same of servers that only compute prompts, or only continue answers"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one server runs."""

    host: str
    port: int
    nccl_port: int
    index: int = 0
    """number of the server among the run's"""
    machines: int = 1
    """over which the server is spread"""
    rank: int = 0
    """number of this machine among them; the first one answers requests"""
    meeting: str = ""
    """HOST:PORT at which several machines find each other"""


def problems_of(recipe: Recipe) -> list[str]:
    """All errors of `[sglang]`, and of what groups and models say for themselves: an unknown name with the nearest, a
    wrong type, what the recipe says elsewhere."""
    try:
        known = known_arguments(installation(recipe.engine.python).folder)
    except UsageError as error:
        return [f"{error.what}; {error.fix}"]
    section = recipe.engine
    tables = {"[sglang]": recipe.sglang}
    tables |= {f"engine.groups[{i}].sglang": group.sglang for i, group in enumerate(section.groups)}
    tables |= {f"engine.models[{i}].sglang": model.sglang for i, model in enumerate(section.models)}
    common = {_field(name, known): value for name, value in recipe.sglang.items()}
    found = []
    for name, table in tables.items():
        given, errors = _read(table, known, name)
        found += errors or _copies_problems(given, common, name)
    return found


def _copies_problems(given: Mapping[str, Any], common: Mapping[str, Any], where: str) -> list[str]:
    """Copies of the model within one server want GPUs of their own, and a run asks for those of one copy."""
    copies = given.get("dp_size", 1)
    if copies == 1 or {**common, **given}.get("enable_dp_attention"):
        return []
    return [
        f"{where} dp_size = {copies}: as many copies of the model in one server; set replicas of the engine, or "
        "enable_dp_attention, which divides the GPUs of one"
    ]


def decided(recipe: Recipe, *, on_gpu: bool) -> list[tuple[str, Any, str]]:
    """(argument, value, reason) of all that slime sets where `[sglang]` does not, without place and model."""
    section = recipe.engine
    out: list[tuple[str, Any, str]] = [
        ("max_running_requests", section.slots, "engine.slots"),
        ("random_seed", recipe.seed, "seed; plus one for each further server"),
        ("weight_version", "0", "the weights before the first update"),
    ]
    if recipe.model.trust_remote_code:
        out.append(("trust_remote_code", True, "model.trust_remote_code"))
    automatic = recipe.model.dtype if on_gpu else "float32"
    dtype, reason = (automatic, "engine.dtype = auto") if section.dtype == "auto" else (section.dtype, "engine.dtype")
    out.append(("dtype", dtype, reason))
    if section.max_context:
        out.append(("context_length", section.max_context, "engine.max_context"))
    if on_gpu and recipe.cluster.placement == "colocated":
        out.append(("enable_memory_saver", True, "cluster.placement = colocated: memory is given up by turns"))
    if not on_gpu:
        tokens = section.slots * recipe.max_context
        reason = "engine.slots x the recipe's context; SGLang would take most of the machine's memory"
        out += [("device", "cpu", "there is no GPU"), ("max_total_tokens", tokens, reason), *ON_CPU]
    known = known_arguments(installation(section.python).folder)
    given = {_field(name, known): value for name, value in recipe.sglang.items()}
    if not on_gpu:
        out += SPLIT_ON_CPU.get(given.get("disaggregation_mode", ""), ())
    return [row for row in out if row[0] not in given]


def command_words(recipe: Recipe, model_dir: Path, place: Place, *, on_gpu: bool) -> list[str]:
    """The server's command line after the program. Raises UsageError with all that `problems_of` finds."""
    known = known_arguments(installation(recipe.engine.python).folder)
    given, errors = _read(recipe.sglang, known)
    if errors:
        raise UsageError("; ".join(errors), "`python -m sglang.launch_server --help` lists what [sglang] takes")
    values: dict[str, Any] = {name: value for name, value, _ in decided(recipe, on_gpu=on_gpu)} | given
    values["random_seed"] = recipe.seed + place.index
    values |= {"model_path": str(model_dir), "host": place.host, "port": place.port, "nccl_port": place.nccl_port}
    if place.machines > 1:
        values |= {"nnodes": place.machines, "node_rank": place.rank, "dist_init_addr": place.meeting}
    if lacking := sorted(values.keys() - known.keys()):
        version = installation(recipe.engine.python).version or "installed"
        raise UsageError(
            f"SGLang {version} does not take {', '.join(lacking)}, which slime has to say to its servers",
            "take another version: python3 bootstrap.py sglang installs the one that slime was tested with",
        )
    return [word for name, value in values.items() for word in words_of(known[name], value)]


def words_of(argument: Argument, value: Any) -> list[str]:
    """One argument as it stands on the command line; nothing for a switch that is off."""
    if argument.switch:
        off = ["--no-" + argument.flag.removeprefix("--")] if argument.switch == "on/off" else []
        return [argument.flag] if value else off
    if isinstance(value, dict) or (isinstance(value, list) and argument.one_word):
        return [argument.flag, json.dumps(value)]
    if isinstance(value, list):
        return [argument.flag, *(json.dumps(x) if isinstance(x, dict) else str(x) for x in value)]
    return [argument.flag, str(value)]


def _read(
    table: Mapping[str, Any], known: Mapping[str, Argument], where: str = "[sglang]"
) -> tuple[dict[str, Any], list[str]]:
    given: dict[str, Any] = {}
    errors: list[str] = []
    for said, value in table.items():
        name = _field(said, known)
        if name in OWNED:
            errors.append(f"{where} {said}: that is said by {OWNED[name]}")
        elif name not in known:
            flags = sorted(k.replace("_", "-") if "-" in said else k for k in known)
            errors.append(f"{where} {said} is no argument of the installed SGLang{nearest(said, flags)}")
        elif name in given:
            errors.append(f"{where} {said}: {name} is given twice")
        else:
            given[name] = value
            problem = _type_problem(known[name], value)
            errors += [f"{where} {said} = {value!r}: {problem}"] if problem else []
    return given, errors


def _field(said: str, known: Mapping[str, Argument]) -> str:
    """The field of ServerArgs behind a spelling; the spelling itself, with underscores, if there is none."""
    name = argument_name(said)
    if name in known:
        return name
    return next((field for field, argument in known.items() if name in argument.aliases), name)


def _type_problem(argument: Argument, value: Any) -> str:
    """Why a value cannot be that of an argument; types that only SGLang itself understands are left to it."""
    text = annotation_said(argument.kind)
    own_type = any(part in text for part in ("Any", "Config", "Dict", "dict", "LoRA"))
    if argument.one_word or own_type or annotation_fits(argument.kind, value):
        return ""
    return f"it takes {text}"

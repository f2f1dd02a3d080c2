"""What can be wrong with a recipe beyond the type of a value. Each check yields its problems; none stops the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slimecli import files, headers
from slimecli.data_tools.folders import SUFFIXES
from slimecli.data_tools.formats import HUB, data_files, read_rows, split_slice
from slimecli.errors import RecipeError, SlimeError, nearest
from slimecli.plan_algo import check_algorithm, check_distillation
from slimecli.plan_layout import check_megatron, check_placement, check_router, check_sglang, check_topology
from slimecli.plan_reward import check_reward
from slimecli.plan_rollout import check_rollout
from slimecli.plan_source import check_source
from slimecli.plan_spec import folder_problems, model_spec
from slimecli.plan_tools import check_tools
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir
from slimecli.static import hook_problem, registry_names
from slimecli.trainers.megatron.layout import data_ranks

_FIELD = re.compile(r"[a-z_]+\.[a-z_]+(?:\.[a-z_]+)*")
"""dotted name of a recipe field in a message"""


@dataclass(frozen=True, kw_only=True)
class DataCount:
    """Rows that a recipe's data gives."""

    train: int | None
    """training prompts; None: not known before they are made"""
    sft: int | None
    """demonstrations; None: not known, or no SFT stage"""


def count_rows(text: str) -> int | None:
    """Rows of a file or folder, slice applied; None for a data set on the hub. Lines are counted, not parsed."""
    path, part = split_slice(text)
    if str(path).startswith(HUB):
        return None
    return len(range(sum(_rows_of(file) for file in data_files(path)))[part])


def _rows_of(file: Path) -> int:
    if file.suffix == ".parquet":
        from pyarrow import parquet

        return int(parquet.read_metadata(file).num_rows)
    if file.suffix != ".jsonl":
        return sum(1 for _ in read_rows(str(file)))
    with file.open("rb") as handle:
        return sum(bool(line.strip()) for line in handle)


def file_problem(field: str, text: str) -> str:
    """Why a data file cannot be read; empty if it can."""
    try:
        path, _ = split_slice(text)
    except SlimeError as error:
        return f"`{field}`: {error.what}"
    if str(path).startswith(HUB):
        return ""
    if Path(str(path).partition("#")[0]).is_dir():
        try:
            data_files(path)
        except SlimeError as error:
            return f"`{field}`: {error.what}"
        return ""
    if path.suffix not in SUFFIXES:
        return f"`{field}` = {text!r}: not a {' or '.join(SUFFIXES)} file, nor a folder of them"
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        return f"`{field}` = {text!r}: there is no such file{nearest(path.name, siblings)}"
    return ""


def check_batch(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """The batch identity, with the nearest values that fulfil it."""
    rollout, trainer = recipe.rollout, recipe.trainer
    made = rollout.batch_size * rollout.n_samples_per_prompt
    used = trainer.global_batch_size * trainer.steps_per_rollout
    if recipe.steps and made != used:
        fixes = [f"trainer.global_batch_size={made // trainer.steps_per_rollout}"] * (
            made % trainer.steps_per_rollout == 0
        )
        fixes += [f"trainer.steps_per_rollout={made // trainer.global_batch_size}"] * (
            made % trainer.global_batch_size == 0
        )
        prompts = max(1, round(used / rollout.n_samples_per_prompt))
        if prompts * rollout.n_samples_per_prompt == used:
            fixes.append(f"rollout.batch_size={prompts}")
        if used % rollout.batch_size == 0:
            fixes.append(f"rollout.n_samples_per_prompt={used // rollout.batch_size}")
        if not fixes:
            fixes = [
                f"rollout.batch_size={prompts} and trainer.global_batch_size={prompts * rollout.n_samples_per_prompt}"
            ]
        yield (
            f"rollout.batch_size {rollout.batch_size} x rollout.n_samples_per_prompt {rollout.n_samples_per_prompt} = "
            f"{made} answers, but trainer.global_batch_size {trainer.global_batch_size} x trainer.steps_per_rollout "
            f"{trainer.steps_per_rollout} = {used}; nearest: {', or '.join(fixes)}"
        )
    ranks = data_ranks(recipe)
    if trainer.global_batch_size % ranks:
        lower = trainer.global_batch_size // ranks * ranks
        shared = f"trainer.processes {ranks}" if ranks == trainer.processes else f"the {ranks} data-parallel processes"
        yield (
            f"trainer.global_batch_size {trainer.global_batch_size} is no multiple of {shared}; "
            f"nearest: {lower or ranks} or {lower + ranks}"
        )


def check_data(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Files exist, and hold enough rows."""
    data = recipe.data
    if run is not None and files.is_committed(run.data_dir):
        return
    if data.train and data.source:
        yield f"`data.train` = {data.train!r} and `data.source` = {data.source!r} contradict each other; keep one"
    elif not data.train and not data.source and (recipe.steps or not recipe.sft.data) and not recipe.only_evaluates:
        yield "no data: set `data.train` to a .jsonl or .parquet file, or `data.source` to a generator"
    if data.source and not data.train and not data.count:
        yield "`data.count` = 0: say how many rows to take from `data.source`"
    if data.source_args and not data.source:
        yield "`data.source_args` is given without `data.source`"
    if data.demonstration_args and not data.demonstrations:
        yield "`data.demonstration_args` is given without `data.demonstrations`"
    yield from check_source(recipe)
    named = {"data.train": "" if data.is_live else data.train, "sft.data": recipe.sft.data}
    named |= {f"eval.sets.{name}": settings.path for name, settings in recipe.eval.sets.items()}
    bad = {field: problem for field, text in named.items() if text and (problem := file_problem(field, text))}
    yield from bad.values()
    if "data.train" not in bad and "sft.data" not in bad:
        yield from _check_counts(recipe)
    for field, text in named.items():
        if field.startswith("eval.sets.") and field not in bad and count_rows(text) == 0:
            yield f"`{field}` = {text!r} has no rows"


def count_data(recipe: Recipe) -> DataCount:
    """Rows for training and for SFT as far as they can be known beforehand."""
    data = recipe.data
    train: int | None = None
    if data.source:
        train = data.count or None
    elif data.train and not data.is_live:
        rows = count_rows(data.train)
        train = None if rows is None else max(0, min(data.count or rows, rows - data.holdout))
    sft = count_rows(recipe.sft.data) if recipe.sft.data else train
    return DataCount(train=train, sft=sft if recipe.sft.steps else None)


def _check_counts(recipe: Recipe) -> Iterator[str]:
    counts = count_data(recipe)
    if recipe.steps and counts.train is not None and counts.train < recipe.rollout.batch_size:
        held = recipe.data.holdout if recipe.data.train else 0
        out_of = f" ({count_rows(recipe.data.train)} rows without the {held} of data.holdout)" if held else ""
        yield (
            f"the data gives {counts.train} training prompts{out_of}, fewer than rollout.batch_size "
            f"{recipe.rollout.batch_size}; give more rows, or lower rollout.batch_size or data.holdout"
        )
    data = recipe.data
    if data.train and not data.source and counts.train is not None and counts.train < data.count:
        yield (
            f"`data.count` = {data.count}, but `data.train` has at most {counts.train} rows besides the {data.holdout} "
            "of data.holdout; lower `data.count`, or leave it out to use all"
        )
    if counts.sft is not None and counts.sft < recipe.sft.batch_size:
        yield f"the data gives {counts.sft} demonstrations, fewer than sft.batch_size {recipe.sft.batch_size}"
    if recipe.sft.steps and recipe.data.source and not recipe.sft.data and not recipe.data.demonstrations:
        yield (
            "`sft.steps` is above 0, but generated prompts carry no demonstrations; "
            "set `data.demonstrations` or `sft.data`"
        )


def check_model(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Where the model comes from, and whether the context fits it."""
    model = recipe.model
    if model.source == "path" and not model.path:
        yield "`model.source` = 'path' needs `model.path`, a folder with config.json"
    if model.source == "hub" and not model.name:
        yield "`model.name` is empty: name a model (`slime models`), or use --model DIR"
    if model.source == "init" and not (model.name or model.path):
        yield "`model.source` = 'init' needs a shape: `model.name`, or `model.path` with a config.json"
    copied = run is not None and files.is_committed(run.model_dir)
    wanted = {"has_tokenizer": not model.tokenizer_vocab, "has_weights": model.source != "init"}
    found = list(folder_problems(model.path, **wanted)) if model.path and not copied else []
    yield from (f"`model.path` = {model.path!r}: {problem}" for problem in found)
    lost = bool(found) and not (headers.config_folder(Path(model.path).expanduser()) / "config.json").is_file()
    if model.tokenizer_vocab and model.source != "init":
        yield "`model.tokenizer_vocab` trains a new tokenizer, which only fits new weights (`model.source` = 'init')"
    if model.name or (model.path and not lost):
        try:
            spec = model_spec(recipe, run)
        except SlimeError as error:
            yield f"[model]: {error.what}; {error.fix}"
        else:
            if 0 < spec.max_positions < recipe.max_context:
                yield (
                    f"a context of {recipe.max_context} tokens (data.max_prompt_tokens + rollout.max_response_tokens, "
                    f"or engine.max_context) is over the {spec.max_positions} that {spec.name} was made for"
                )
    needed = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    if recipe.engine.max_context and recipe.engine.max_context < needed:
        yield (
            f"`engine.max_context` = {recipe.engine.max_context} is below data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {needed}"
        )


def check_names(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Registry names and own functions."""
    keep = recipe.rollout.dynamic_filter
    is_path = ":" in keep or "." in keep
    own_algorithm = ":" in recipe.algo.name or "." in recipe.algo.name
    reward = "" if recipe.reward.path else recipe.reward.type.removeprefix("boxed_")
    named: list[tuple[str, str, str, str]] = [
        ("algo.name", "" if own_algorithm else recipe.algo.name, "slimecli.algos", "ALGORITHMS"),
        ("reward.type", reward, "slimecli.data_tools.rewards", "REWARDS"),
        ("rollout.dynamic_filter", "" if is_path else keep, "slimecli.data_tools.filters", "FILTERS"),
        ("data.source", recipe.data.source.partition(":")[0], "slimecli.data_tools.sources", "SOURCES"),
        ("data.demonstrations", recipe.data.demonstrations, "slimecli.data_tools.demonstrations", "DEMONSTRATIONS"),
        ("trainer.backend", recipe.trainer.backend, "slimecli.trainers", "TRAINERS"),
    ]
    hooks = {"reward.path": recipe.reward.path}
    for field, name, module, registry in _names_of_sets(recipe):
        if ":" in name or "." in name:
            hooks[field] = name
        else:
            named.append((field, name, module, registry))
    for field, name, module, registry in named:
        known = registry_names(module, registry) if name else []
        if name and name not in known:
            yield f"`{field}` = {name!r} is unknown{nearest(name, known)}; known: {', '.join(sorted(known))}"
    hooks |= {"rollout.dynamic_filter": keep} if is_path else {}
    hooks |= {"algo.name": recipe.algo.name} if own_algorithm else {}
    for field, spec in hooks.items():
        problem = hook_problem(spec) if spec else ""
        if problem:
            yield f"`{field}` = {problem}"


def _names_of_sets(recipe: Recipe) -> Iterator[tuple[str, str, str, str]]:
    """Converters and the evaluation sets' own scorers: names of a registry, or paths."""
    converters = ("slimecli.data_tools.converters", "CONVERTERS")
    yield ("data.convert", recipe.data.convert, *converters)
    for name, settings in recipe.eval.sets.items():
        yield (f"eval.sets.{name}.convert", settings.convert or "", *converters)
        reward = (settings.reward or "").removeprefix("boxed_")
        yield (f"eval.sets.{name}.reward", reward, "slimecli.data_tools.rewards", "REWARDS")


def check_contradictions(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Values that are fine alone and senseless together."""
    rollout, trainer = recipe.rollout, recipe.trainer
    if recipe.steps == 0 and recipe.sft.steps == 0 and not recipe.only_evaluates:
        yield "`steps` and `sft.steps` are both 0: there is nothing to train"
    if recipe.steps and rollout.temperature == 0:
        yield "`rollout.temperature` = 0: all answers of a group would be the same, and nothing could be learnt"
    if recipe.steps and trainer.warmup_steps > recipe.optimizer_steps:
        yield f"`trainer.warmup_steps` = {trainer.warmup_steps} is above the run's {recipe.optimizer_steps} steps"
    if recipe.sft.steps and recipe.sft.warmup_steps > recipe.sft.steps:
        yield f"`sft.warmup_steps` = {recipe.sft.warmup_steps} is above `sft.steps` = {recipe.sft.steps}"
    if 0 < rollout.over_sampling_batch_size < rollout.batch_size:
        yield (
            f"`rollout.over_sampling_batch_size` = {rollout.over_sampling_batch_size} is below "
            f"`rollout.batch_size` = {rollout.batch_size}"
        )
    if rollout.over_sampling_batch_size and not rollout.dynamic_filter and not rollout.partial:
        yield "`rollout.over_sampling_batch_size` has no effect without `rollout.dynamic_filter` or `rollout.partial`"
    if recipe.eval.interval and not recipe.eval.sets and not recipe.data.holdout and run is None:
        yield "`eval.interval` is set, but there is nothing to evaluate on: set `data.holdout` or `eval.sets`"


def check_backends(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Pass-through tables belong to their backend; the sync kind must reach the engines."""
    if recipe.megatron and recipe.trainer.backend != "megatron":
        yield "`[megatron]` is given, but `trainer.backend` is 'fsdp'; set that to 'megatron' or remove the table"
    if recipe.trainer.bridge != "slime" and recipe.trainer.backend != "megatron":
        yield f"`trainer.bridge` = {recipe.trainer.bridge!r} has no effect with `trainer.backend` = 'fsdp'"
    if recipe.sglang and recipe.engine.backend != "sglang":
        yield "`[sglang]` is given, but `engine.backend` is 'embedded'; set that to 'sglang' or remove the table"
    if recipe.sglang and recipe.engine.urls:
        yield "`[sglang]` has no effect: the servers in `engine.urls` were started with arguments of their own"
    if recipe.sync.kind == "in_process" and recipe.cluster.backend == "ray":
        yield "`sync.kind` = 'in_process' needs `cluster.backend` = 'local': under Ray they are two processes"
    if recipe.sync.kind in ("shared_memory", "tensor") and recipe.engine.urls and not recipe.is_one_host:
        yield f"`sync.kind` = {recipe.sync.kind!r} reaches engines of this machine, some of `engine.urls` are elsewhere"
    own_embedded = recipe.engine.backend == "embedded" and not recipe.engine.urls
    if recipe.sync.kind == "distributed" and recipe.cluster.backend == "local" and own_embedded:
        yield "`sync.kind` = 'distributed' needs `cluster.backend` = 'ray' or `engine.urls`: 'local' is one process"
    if recipe.cluster.backend == "local":
        for field, number in (
            ("trainer.processes", recipe.trainer.processes),
            ("engine.replicas", recipe.engine.replicas),
        ):
            if number > 1 and not (field == "engine.replicas" and recipe.engine.urls):
                yield f"`{field}` = {number} needs `cluster.backend` = 'ray': 'local' is one process"
    for url in recipe.engine.urls:
        if not url.startswith(("http://", "https://")):
            yield f"`engine.urls`: {url!r} is not an http:// address"


CHECKS: tuple[Callable[[Recipe, RunDir | None], Iterator[str]], ...] = (
    check_batch,
    check_data,
    check_model,
    check_names,
    check_reward,
    check_rollout,
    check_tools,
    check_contradictions,
    check_algorithm,
    check_distillation,
    check_backends,
    check_megatron,
    check_placement,
    check_sglang,
    check_router,
    check_topology,
)
"""every check that needs nothing but the recipe and the run directory"""


def all_problems(recipe: Recipe, run: RunDir | None) -> list[str]:
    """Every problem of every check."""
    return [problem for check in CHECKS for problem in check(recipe, run)]


def further_problems(error: RecipeError) -> list[str]:
    """What is wrong besides the entries that could not even be read.

    Those that speak of an entry which was left out (or of its nearest name) are not told: they may only follow from it.
    """
    if not isinstance(error.rest, Recipe):
        return []
    told = [set(_FIELD.findall(problem)) for problem in error.problems]
    if not all(told):
        return []  # a whole section, or one of the few numbers on top that most checks depend on
    names = set().union(*told)
    return [p for p in all_problems(error.rest, None) if names.isdisjoint(_FIELD.findall(p))]

"""What can be wrong with overlapping rollout and training, with interrupted answers and with data sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from slimecli.recipe import Recipe
from slimecli.recipe_rollout import RolloutSection
from slimecli.rundir import RunDir, run_path
from slimecli.static import hook_problem, module_file, registry_names


def check_rollout(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Values of [rollout], [sync] and [data] that contradict each other, or that nothing looks at."""
    if not recipe.steps:
        return
    yield from _check_overlap(recipe)
    yield from _check_partial(recipe.rollout)
    yield from _check_stream(recipe)
    yield from _check_sources(recipe)
    yield from _check_evaluation(recipe)
    if recipe.data.is_live:
        yield from _check_live(recipe)


def _check_overlap(recipe: Recipe) -> Iterator[str]:
    rollout, interval = recipe.rollout, recipe.sync.interval
    if rollout.max_staleness < interval - 1:
        yield (
            f"`sync.interval` = {interval} makes answers up to {interval - 1} versions old, and "
            f"`rollout.max_staleness` = {rollout.max_staleness}; set that to {interval - 1} or more"
        )
    for field, every in (("eval.interval", recipe.eval.interval), ("checkpoint.interval", recipe.checkpoint.interval)):
        if every % interval:
            yield (
                f"`{field}` = {every} is not a multiple of `sync.interval` = {interval}: evaluations and checkpoints "
                "are made of weights that the engines hold"
            )
    if rollout.fully_async and not rollout.max_staleness:
        yield "`rollout.fully_async` needs `rollout.max_staleness` = 1 or more: with 0 generation waits for every step"
    if rollout.fully_async and rollout.partial:
        yield (
            "`rollout.partial` has no effect with `rollout.fully_async`: answers are not interrupted there, their "
            "weights change while they run"
        )


def _check_partial(rollout: RolloutSection) -> Iterator[str]:
    default = RolloutSection()
    if rollout.partial and rollout.over_sampling_batch_size <= rollout.batch_size:
        yield (
            f"`rollout.partial` interrupts what runs beyond `rollout.batch_size` = {rollout.batch_size} groups: set "
            "`rollout.over_sampling_batch_size` above it"
        )
    if rollout.partial and rollout.custom_generate and not continues(rollout.custom_generate):
        yield (
            f"`rollout.partial`: `rollout.custom_generate` = {rollout.custom_generate!r} does not say that it can "
            "continue an interrupted sample; if it can, write `FUNCTION.supports_partial = True` below it"
        )
    idle = ("partial_staleness", "mask_off_policy_tokens") if not rollout.partial else ()
    for field in idle:
        if getattr(rollout, field) != getattr(default, field):
            yield f"`rollout.{field}` has no effect without `rollout.partial`"
    if rollout.stale == "mask" and not rollout.partial and not rollout.fully_async:
        yield "`rollout.stale` has no effect without `rollout.partial` or `rollout.fully_async`: nothing grows too old"


def _check_evaluation(recipe: Recipe) -> Iterator[str]:
    """Answers of an evaluation must fit into the embedded engine; SGLang has the model's whole context."""
    engine, default = recipe.engine, recipe.eval.max_response_tokens or recipe.rollout.max_response_tokens
    if not recipe.eval.interval or engine.backend != "embedded" or engine.urls:
        return
    needed = {"eval.max_response_tokens": recipe.data.max_prompt_tokens + default} if recipe.data.holdout else {}
    for name, given in recipe.eval.sets.items():
        prompt = given.max_prompt_tokens or recipe.data.max_prompt_tokens
        needed[f"eval.sets.{name}"] = prompt + (given.max_response_tokens or default)
    for field, tokens in needed.items():
        if tokens > recipe.max_context:
            yield (
                f"`{field}`: prompt and answer may have {tokens} tokens, the engine has a context of "
                f"{recipe.max_context}; set `engine.max_context` = {tokens}"
            )


def _check_stream(recipe: Recipe) -> Iterator[str]:
    if recipe.rollout.stream and recipe.rollout.custom_generate:
        yield "`rollout.stream` has no effect with `rollout.custom_generate`, which asks the engine by itself"
    if recipe.data.workers and recipe.data.stream:
        yield "`data.workers` has no effect with `data.stream`, which reads each prompt when its turn comes"
    if recipe.rollout.stream and recipe.data.is_live:
        yield "`rollout.stream` has no effect on live data: others ask for those answers"


def _check_sources(recipe: Recipe) -> Iterator[str]:
    rollout, data = recipe.rollout, recipe.data
    own = {"rollout.data_source": rollout.data_source, "rollout.buffer_filter": rollout.buffer_filter}
    for field, spec in own.items():
        if spec and (problem := hook_problem(spec)):
            yield f"`{field}` = {problem}"
    unused = {"data.mix": data.mix, "data.stream": data.stream, "rollout.buffer_filter": rollout.buffer_filter}
    for field, value in unused.items():
        if value and rollout.data_source:
            yield f"`{field}` has no effect with `rollout.data_source`, which hands out prompts by itself"
    for name, weight in data.mix.items():
        if not 0 < weight < float("inf"):
            yield f"`data.mix` gives {name!r} the weight {weight:g}: weights are positive numbers"
    refills = rollout.partial or rollout.dynamic_filter or rollout.fully_async
    if rollout.buffer_filter and not refills:
        yield (
            "`rollout.buffer_filter` has no effect without `rollout.dynamic_filter`, `rollout.partial` or "
            "`rollout.fully_async`: no group ever waits"
        )


def continues(spec: str) -> bool:
    """Whether the file of a generate function says `FUNCTION.supports_partial = True`; nothing is imported."""
    if spec in registry_names("slimecli.rollout.custom", "GENERATE"):
        return True
    place, _, name = spec.rpartition(":" if ":" in spec else ".")
    path = Path(place).expanduser() if place.endswith(".py") else module_file(place) if place else None
    if path is None or not path.is_file():
        return False
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:
        return False  # told with the hook itself
    return any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == f"{name}.supports_partial"
        and ast.unparse(node.value) == "True"
        for node in tree.body
    )


def rollout_warnings(recipe: Recipe) -> list[str]:
    """What is allowed, and deserves a look."""
    rollout, algo = recipe.rollout, recipe.algo
    found = []
    is_corrected = algo.correction.level != "none" or algo.correction.reject_level != "none" or algo.opsm_delta > 0
    stale = rollout.oldest if not rollout.mask_off_policy_tokens else rollout.max_staleness
    if recipe.steps and stale and not is_corrected and algo.old_log_probs != "engine":
        found.append(
            f"answers may be up to {stale} versions old, and are trained on as if the policy of the step had given "
            "them; algo.correction.level = 'token' weights them (docs/algorithms.md, decoupled policy)"
        )
    useful = 2 * recipe.sync.interval - 1
    if recipe.steps and rollout.max_staleness > useful and not rollout.fully_async:
        found.append(
            f"rollout.max_staleness = {rollout.max_staleness} gains nothing over {useful} at sync.interval = "
            f"{recipe.sync.interval}: {recipe.sync.interval} batches are made between two updates, however far ahead "
            "they are; answers only get older. rollout.fully_async does not wait for updates"
        )
    if recipe.steps and (rollout.partial or rollout.fully_async):
        which = "rollout.partial" if rollout.partial else "rollout.fully_async"
        found.append(f"{which}: which answers are interrupted depends on timing, so two runs of one seed differ")
    if recipe.steps and rollout.overlaps and recipe.cluster.backend == "local":
        found.append("rollout.max_staleness with cluster.backend = 'local': trainer and engine share one process")
    return found


def _check_live(recipe: Recipe) -> Iterator[str]:
    """What has no meaning where conversations are recorded by a server (data.train = "live:")."""
    rollout, name = recipe.rollout, recipe.data.train.partition(":")[2]
    idle = {
        "max_staleness": rollout.max_staleness > 0,
        "partial": rollout.partial,
        "custom_generate": bool(rollout.custom_generate),
        "dynamic_filter": bool(rollout.dynamic_filter),
    }
    for field in (f for f, is_set in idle.items() if is_set):
        instead = "; see live.max_staleness" if field == "max_staleness" else ""
        yield f"`rollout.{field}` has no effect on `data.train` = {recipe.data.train!r}: a server answers{instead}"
    if recipe.data.holdout or recipe.data.count:
        yield "`data.holdout` and `data.count` have no effect on live conversations; set eval.sets to evaluate"
    if name and not (run_path(name) / "run.json").is_file():
        yield f"`data.train` = {recipe.data.train!r}: there is no run at {run_path(name)}"
    if not rollout.temperature:
        yield "`rollout.temperature` = 0: recorded answers must be sampled to be learnt from"

"""Which servers a run starts: the policy's, in groups, and those of frozen models. What each is told, and its GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimecli.recipe import Recipe, sglang_name
from slimecli.recipe_engine import ServerGroupSection

_DOOR = "disaggregation_bootstrap_port"
FIRST_DOOR = 8998
"""SGLang's own choice, taken by the first server that computes prompts"""
_TAKEN = ("engine", "router", "trainer")
"""names of other logs"""
MODEL = "model:"
"""begins what stands for the address of a served model"""


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """One server to start."""

    model: str
    """name of the frozen model; empty: the policy"""
    path: str
    """HF folder; empty: the run's own weights"""
    kind: str
    """regular, prefill or decode"""
    recipe: Recipe
    """with the server's own arguments, and one replica"""

    @property
    def bootstrap_port(self) -> int:
        """Where servers that continue answers ask one that computes prompts for its results; 0: nobody does."""
        return int(self.recipe.sglang.get(_DOOR, 0)) if self.kind == "prefill" else 0

    @property
    def gpus(self) -> int:
        """GPUs it is spread over."""
        return self.recipe.gpus_per_engine

    @property
    def parts(self) -> list[int]:
        """GPUs it has on each of its machines."""
        machine = self.recipe.cluster.gpus_per_machine
        return [self.gpus] if self.gpus <= machine else [machine] * -(-self.gpus // machine)


def policy_servers(recipe: Recipe) -> list[ServerPlan]:
    """The servers that get new weights."""
    if not recipe.engine.groups:
        return [_plan(recipe, {}, "regular") for _ in range(recipe.engine.replicas)]
    found: list[ServerPlan] = []
    for group in recipe.engine.groups:
        for number in range(group.replicas):
            found.append(_plan(recipe, _with_port(recipe, group, number, len(found)), group.kind))
    return found


def _with_port(recipe: Recipe, group: ServerGroupSection, number: int, index: int) -> dict[str, Any]:
    """Arguments of a group's server; those that compute prompts may share a machine, and not the port of their door:
    the first one has the port that is given, and the others those after it.

    Args:
        number: of the server in its group.
        index: among all.
    """
    own = {sglang_name(name): value for name, value in group.sglang.items()}
    if group.kind != "prefill":
        return own
    common = {sglang_name(name): value for name, value in recipe.sglang.items()}
    first, place = (own[_DOOR], number) if _DOOR in own else (common.get(_DOOR, FIRST_DOOR), index)
    # what is no number is told by the plan, with all other arguments
    return {**own, _DOOR: first + place if isinstance(first, int) else first}


def model_servers(recipe: Recipe) -> list[ServerPlan]:
    """The servers of frozen models."""
    found = []
    for model in recipe.engine.models:
        changes = {"slots": model.slots or recipe.engine.slots, "max_context": model.max_context}
        for _ in range(model.replicas):
            found.append(_plan(recipe, model.sglang, "regular", model=model.name, path=model.path, **changes))
    return found


def servers_of(recipe: Recipe) -> list[ServerPlan]:
    """All servers that a run starts, the policy's first."""
    if not recipe.steps:
        return []
    return ([] if recipe.engine.urls else policy_servers(recipe)) + model_servers(recipe)


def _plan(
    recipe: Recipe, sglang: Mapping[str, Any], kind: str, *, model: str = "", path: str = "", **engine: Any
) -> ServerPlan:
    changes = {"replicas": 1, "groups": [], "models": [], **engine}
    given = {sglang_name(name): value for table in (recipe.sglang, sglang) for name, value in table.items()}
    if kind != "regular":
        given["disaggregation_mode"] = kind
    if python := recipe.engine.python:  # a process that starts it may have another current folder
        changes["python"] = str(Path(python).expanduser().absolute())
    own = recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changes), "sglang": given})
    return ServerPlan(model=model, path=path, kind=kind, recipe=own)


def named_model(address: str) -> str:
    """The served model that an address stands for; empty for a real address."""
    return address.removeprefix(MODEL) if address.startswith(MODEL) else ""


def topology_problems(recipe: Recipe) -> Iterator[str]:
    """What is wrong with groups and served models, and with addresses that stand for a model."""
    section = recipe.engine
    kinds = {group.kind for group in section.groups}
    if section.groups and section.backend != "sglang":
        yield "`engine.groups` are servers of SGLang; set `engine.backend` = 'sglang', or use `engine.replicas`"
    if section.groups and section.replicas != 1:
        yield "`engine.replicas` has no effect beside `engine.groups`, which say their own"
    if section.groups and section.urls:
        yield "`engine.groups` are started, `engine.urls` run already; leave one of them empty"
    if len(kinds & {"prefill", "decode"}) == 1:
        yield f"`engine.groups` has {kinds & {'prefill', 'decode'}}, and neither works without the other"
    if len(kinds) > 1 and "regular" in kinds:
        yield "`engine.groups` mixes regular servers with prefill and decode ones; one router leads to one sort"
    if "prefill" in kinds and section.router in ("none", "builtin"):
        yield f"`engine.router` = {section.router!r} knows no prefill and decode servers; take 'smg' or 'sglang'"
    machine = recipe.cluster.gpus_per_machine
    for gpus in sorted(
        {server.gpus for server in servers_of(recipe) if server.gpus > machine and server.gpus % machine}
    ):
        yield f"an engine of {gpus} GPUs does not fill machines of `cluster.gpus_per_machine` = {machine}"
    names = [model.name for model in section.models]
    yield from (f"`engine.models` has two of the name {n!r}" for n in sorted({n for n in names if names.count(n) > 1}))
    yield from (
        f"`engine.models` cannot call one {name!r}: its log has this name; take letters, digits, `.`, `_` and `-`"
        for name in names
        if name in _TAKEN or not re.fullmatch(r"\w[\w.-]*", name)
    )
    for field, address in (("distill.url", recipe.distill.url), ("reward.judge.url", recipe.reward.judge.url)):
        name = named_model(address)
        if name and name not in names:
            yield f"`{field}` = {address!r}: `engine.models` has no {name!r} (it has: {', '.join(names) or 'none'})"
    if section.models and recipe.cluster.backend == "local":
        yield "`engine.models` needs `cluster.backend` = 'ray': 'local' is one process"

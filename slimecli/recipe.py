"""Recipe: everything a run depends on. TOML is written by people, resolved JSON by the machine.

A recipe is read in this order, later wins: defaults, `--recipe NAME|FILE`, `--model DIR`, each `--set a.b=c`.
"""

from __future__ import annotations

import copy
import itertools
import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from slimecli import files
from slimecli.errors import RecipeError, SlimeError, UsageError, nearest
from slimecli.flags import expand_sglang, megatron_overrides
from slimecli.protocols import Running, SyncKind
from slimecli.recipe_algo import AlgoSection, DistillSection
from slimecli.recipe_engine import ClusterSection, EngineSection, SyncSection
from slimecli.recipe_live import LiveSection
from slimecli.recipe_reward import RewardSection
from slimecli.recipe_rollout import EvalSection, RolloutSection
from slimecli.recipe_sections import (
    CheckpointSection,
    DataSection,
    ExportSection,
    GatesSection,
    ModelSection,
    ObserveSection,
    Section,
    SftSection,
    TrainerSection,
)
from slimecli.recipe_tools import ToolsSection

RECIPES_DIR = Path(__file__).parent / "recipes"


PASSED_ON_TABLES = ("megatron", "sglang", "router")
"""tables of arguments that other programs take, with dashes or underscores"""
_SHORT = {"tp": "tp_size", "tensor_parallel_size": "tp_size", "pp": "pp_size", "pipeline_parallel_size": "pp_size"}


def sglang_name(said: str) -> str:
    """`--tensor-parallel-size`, `tp` -> `tp_size`: one spelling where slime itself looks at an argument of SGLang."""
    name = said.removeprefix("--").replace("-", "_")
    return _SHORT.get(name, name)


class Recipe(Section):
    """All sections of a run."""

    title: str = ""
    """one line on what this recipe does"""
    source: str = ""
    """paper, repository or measurement that the numbers come from"""
    seed: int = Field(0, ge=0, lt=2**31)
    """root of every random number of the run"""
    steps: int = Field(100, ge=0)
    """rollout steps of the run in all (not further ones after a resume); 0: SFT only"""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    live: LiveSection = LiveSection()
    rollout: RolloutSection = RolloutSection()
    tools: ToolsSection = ToolsSection()
    reward: RewardSection = RewardSection()
    algo: AlgoSection = AlgoSection()
    distill: DistillSection = DistillSection()
    trainer: TrainerSection = TrainerSection()
    sft: SftSection = SftSection()
    eval: EvalSection = EvalSection()
    engine: EngineSection = EngineSection()
    sync: SyncSection = SyncSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()
    gates: GatesSection = GatesSection()
    observe: ObserveSection = ObserveSection()
    export: ExportSection = ExportSection()
    megatron: dict[str, Any] = {}
    """arguments passed to Megatron as they are, checked against the installed version"""
    sglang: dict[str, Any] = {}
    """arguments passed to SGLang servers as they are, checked against the installed version"""
    router: dict[str, Any] = {}
    """arguments passed to the router of engine.router as they are, checked against the installed version"""

    @property
    def max_context(self) -> int:
        """Prompt plus answer (tokens) that the engine must hold."""
        return self.engine.max_context or self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def engine_layout(self) -> tuple[int, int]:
        """(tensor-parallel ranks, pipeline stages) of one engine: SGLang's; the embedded engine is one process."""
        if self.engine.backend != "sglang":
            return 1, 1
        given = {sglang_name(name): int(value) for name, value in self.sglang.items() if str(value).isdigit()}
        return given.get("tp_size", 1), given.get("pp_size", 1)

    @property
    def gpus_per_engine(self) -> int:
        """GPUs that one engine is spread over: a rank of every stage on each."""
        ranks, stages = self.engine_layout
        return ranks * stages

    @property
    def only_evaluates(self) -> bool:
        """Whether there is nothing to train, but sets for `slime eval`."""
        return not self.steps and not self.sft.steps and bool(self.eval.sets)

    @property
    def is_served_elsewhere(self) -> bool:
        """Whether the run needs no engine: it learns from served conversations, and measures and pushes nothing."""
        return self.data.is_live and not self.engine.urls and not self.eval.interval

    @property
    def is_one_host(self) -> bool:
        """Whether trainer and engines are all on this machine: no cluster is joined, and no engine is elsewhere."""
        hosts = {urlsplit(url).hostname for url in self.engine.urls}
        return not self.cluster.address and hosts <= {"127.0.0.1", "localhost", "::1"}

    @property
    def running_requests(self) -> Running:
        """What becomes of answers under way when new weights come."""
        if self.sync.running != "auto":
            return self.sync.running
        return "continue" if self.rollout.fully_async else "finish"

    def sync_kind(self, backend: str) -> SyncKind:
        """The way of weight sync on a cluster backend: `sync.kind`, or for `auto` the quickest that reaches.

        A single command on a run that broadcasts under Ray has trainer and engine in one process, where a broadcast
        would wait for itself: nothing is sent there.
        """
        starts_sglang = self.engine.backend == "sglang" and not self.engine.urls
        if self.sync.kind == "distributed" and backend == "local" and not self.engine.urls and not starts_sglang:
            return "in_process"
        if self.sync.kind != "auto":
            return self.sync.kind
        if self.engine.urls or self.cluster.address or starts_sglang:
            return "disk"
        return "in_process" if backend == "local" else "shared_memory"

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the RL stage: the length of the learning-rate schedule."""
        return self.steps * self.trainer.steps_per_rollout

    def to_json(self) -> str:
        """Resolved form, stable key order."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with slime."""
    return {p.stem: p for p in sorted(RECIPES_DIR.glob("*.toml"))}


def recipe_path(name: str) -> Path:
    """The file for a recipe name or path."""
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.is_file():
        return path
    raise UsageError(
        f"no recipe {name!r}{nearest(name, list(shipped))}",
        f"name one of {', '.join(shipped)}, or a TOML file; `slime recipes` lists them",
    )


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict; a syntax error names line and column."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError([str(error)], source=str(path)) from None
    except UnicodeDecodeError as error:
        raise RecipeError([f"not UTF-8 text: {error}"], source=str(path)) from None


def parse_override(text: str) -> tuple[list[str], Any]:
    """`a.b=c` -> (["a", "b"], value). The value is TOML; what is not valid TOML is taken as a plain string."""
    key, sep, raw = text.partition("=")
    if not sep or not key.strip():
        raise UsageError(f"--set {text!r} is not key=value", "write --set trainer.lr=1e-6")
    try:
        value = tomllib.loads(f"x = {raw}")["x"]
    except tomllib.TOMLDecodeError:
        value = raw
    return key.strip().split("."), value


def apply_override(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set a nested key in place."""
    for depth, key in enumerate(keys[:-1]):
        node = tree.setdefault(key, {})
        if keys[:depth] == ["eval", "sets"] and isinstance(node, str):  # a set that was no more than its path
            node = tree[key] = {"path": node}
        if not isinstance(node, dict):
            raise UsageError(f"--set {'.'.join(keys)}: {key!r} is not a section", "see `slime recipes --fields`")
        tree = node
    if len(keys) == 2 and keys[0] in PASSED_ON_TABLES:
        for said in [k for k in tree if k.replace("-", "_") == keys[1].replace("-", "_")]:
            del tree[said]  # the same argument in the other spelling
    tree[keys[-1]] = value


def load_recipe(name: str = "", overrides: tuple[str, ...] = (), model: str = "") -> Recipe:
    """Read, override and validate.

    Args:
        name: shipped recipe name or TOML file; empty: defaults only.
        overrides: `section.key=value` strings.
        model: registry name or HF folder that replaces the recipe's model.

    Raises RecipeError with every problem at once.
    """
    tree = read_toml(recipe_path(name)) if name else {}
    if model:
        kept = {k: v for k, v in tree.get("model", {}).items() if k in ("dtype", "trust_remote_code")}
        is_path = Path(model).exists() or model.startswith((".", "/", "~"))
        tree["model"] = kept | ({"path": model, "source": "path"} if is_path else {"name": model, "source": "hub"})
    for text in overrides:
        apply_override(tree, *parse_override(text))
    return validate_recipe(tree, source=name or "the defaults")


def lost_recipe_fix(stored: Sequence[Path], manifest_path: Path) -> str:
    """What brings back a run's newest recipe file, which cannot be read.

    Args:
        stored: the run's recipe files, newest last; the first was made from recipe.toml beside it and the command line,
            each other one by a change to the one before it.
        manifest_path: run.json, which keeps the command line and the reasons of changes.
    """
    path = stored[-1]
    if (path.parent.parent / manifest_path.name).is_file():  # of the SFT stage, made from the outer run's
        return f"remove {path.parent}: the stage is then done anew"
    try:
        manifest = files.read_json(manifest_path)
    except (SlimeError, FileNotFoundError):
        return f"start a new run: {manifest_path}, which could tell how it was made, cannot be read either"
    if len(stored) > 1:
        whys = [c["why"] for c in manifest.get("recipe_changes", []) if c["file"] == path.name]
        return f"remove it to go on with {stored[-2].name}; what it changed: {', '.join(whys) or 'not known'}"
    argv = manifest.get("argv", [])
    end = argv.index("--") if "--" in argv else len(argv)
    own, megatron = expand_sglang(argv[:end]), argv[end + 1 :]
    words = [w for pair in itertools.pairwise(own) if pair[0] in ("--set", "--model") for w in pair]
    words += [w for w in own if w.startswith(("--set=", "--model="))]
    words += [w for override in megatron_overrides(megatron) for w in ("--set", override)]
    command = ["slime", "recipes", "show", str(path.with_name("recipe.toml")), "--resolved", *words]
    return f"make it again: {shlex.join(command)} > {shlex.quote(str(path))}"


def override_recipe(recipe: Recipe, overrides: tuple[str, ...]) -> Recipe:
    """The recipe with `section.key=value` strings applied. Raises RecipeError with every problem at once."""
    tree = recipe.model_dump(mode="json")
    for text in overrides:
        apply_override(tree, *parse_override(text))
    return validate_recipe(tree, source="--set")


def validate_recipe(tree: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """A Recipe, or a RecipeError that lists every wrong key and value."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        known = [path for path, _, _ in recipe_fields()]
        told = RecipeError([_explain(e, known) for e in error.errors()], source=source)
        told.rest = _without(tree, [e["loc"] for e in error.errors()])
        raise told from None


def _without(tree: Mapping[str, Any], places: list[tuple[int | str, ...]]) -> Recipe | None:
    """The recipe without the entries at `places`; None if what is left is wrong all the same."""
    rest = copy.deepcopy(dict(tree))
    for *sections, name in places:
        node: Any = rest
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(name, None)
    try:
        return Recipe.model_validate(rest)
    except ValidationError:
        return None


def _explain(error: Any, known: list[str]) -> str:
    """One pydantic error as a sentence with the dotted path, and the nearest valid name where there is one."""
    path = ".".join(str(x) for x in error["loc"])
    if error["type"] == "extra_forbidden":
        section = path.rpartition(".")[0]
        siblings = [k for k in known if k.rpartition(".")[0] == section] or known
        # a top-level name may be a misspelt section as well as a misspelt field
        siblings += [] if section else section_names()
        return f"unknown key `{path}`{nearest(path, siblings) or nearest(path, known)}"
    if error["type"] == "model_type":
        fields = [k for k in known if k.startswith(f"{path}.")]
        return f"`{path}` = {error['input']!r}: this is a section; write a [{path}] table, e.g. with {fields[0]}"
    text = f"`{path}` = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
    if error["type"] == "list_type" and isinstance(error["input"], str):
        text += f", e.g. {json.dumps([error['input']], ensure_ascii=False)}"
    if error["type"] == "literal_error":
        allowed = str(error["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        text += nearest(str(error["input"]), allowed)
    return text


def section_names() -> list[str]:
    """Names of the sections of a recipe."""
    return [name for name, info in Recipe.model_fields.items() if _is_section(info.annotation)]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def recipe_fields(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted name, default, help) of every field, depth first."""
    for name, info in section.model_fields.items():
        annotation = info.annotation
        if _is_section(annotation):
            yield from recipe_fields(cast(type[Section], annotation), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info.default, " ".join((info.description or "").split())

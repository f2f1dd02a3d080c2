"""From a recipe's [model] section to an HF folder on this machine."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimecli import files
from slimecli.errors import DataError, MissingStageError, UsageError
from slimecli.frozen import frozen_checkpoints, frozen_copy, note_of
from slimecli.headers import config_folder, is_torch_dist
from slimecli.model_specs import ModelSpec, from_config, get_spec
from slimecli.weights.check import check_folder
from slimecli.weights.hf import COMPANIONS, INDEX, save_hf_folder
from slimecli.weights.listing import MODEL_FILES
from slimecli.weights.quant import Dequantized, open_weights

if TYPE_CHECKING:
    from slimecli.recipe import Recipe
    from slimecli.recipe_sections import ModelSection
    from slimecli.rundir import RunDir
    from slimecli.weights.hub import Fetched

TOKENIZER_FILES = tuple(n for n in COMPANIONS if n not in ("config.json", "generation_config.json"))


def resolve_model_dir(model: str, *, revision: str = "", offline: bool = False) -> Path:
    """The folder for a registry name (downloaded into the shared cache if need be) or a path, checked."""
    from slimecli.weights.hub import Access

    path = Path(model).expanduser()
    if path.exists() or model.startswith((".", "/", "~")):
        check_folder(path)
        return path
    spec = get_spec(model)
    folder = fetch_spec(spec, revision=revision, access=Access(offline=offline)).folder
    check_folder(folder, spec)
    return folder


def fetch_spec(
    spec: ModelSpec,
    *,
    revision: str = "",
    allow: Sequence[str] = (),
    **how: Any,
) -> Fetched:
    """Bring a registry model; its config is compared with the registry before the first weight is fetched.

    Args:
        revision: empty: the one the registry names.
        how: further arguments of hub.fetch.
    """
    from slimecli.weights.hub import fetch

    if not spec.repo:
        raise UsageError(f"{spec.name} has no published weights", "use it with --set model.source=init")
    wanted = revision or spec.revision
    pinned = wanted
    if not allow or any(fnmatch.fnmatch("model.safetensors", a) for a in allow):
        first = fetch(spec.repo, revision=wanted, **{**how, "allow": ("config.json",), "ignore": ()})
        differing = spec.check(files.read_json(first.folder / "config.json"))
        if differing:
            raise DataError(
                f"{spec.repo}@{wanted} is not {spec.name}: {'; '.join(differing)}",
                "name another revision, or the repository's own name; no weights were fetched",
            )
        pinned = first.commit or wanted
    return dataclasses.replace(fetch(spec.repo, revision=pinned, allow=allow, **how), revision=wanted)


def materialise_model(recipe: Recipe, run: RunDir) -> Path:
    """Bring the recipe's model into run.model_dir, complete and checked; returns that folder.

    Weight files are hard-linked where the file system allows it (a model is never written in place), else copied.
    """
    section = recipe.model
    notes: dict[str, Any] = {"source": section.source, "name": section.name, "path": section.path}
    if section.source == "init":
        with files.committed_folder(run.model_dir, notes) as folder:
            notes |= _init(recipe, run, folder)
        return run.model_dir
    expected = get_spec(section.name) if section.name else None
    if section.source == "path":
        if not section.path:
            raise UsageError("model.source = 'path' without model.path", "--set model.path=DIR, or --model DIR")
        source = Path(section.path).expanduser()
    else:
        if expected is None:
            raise UsageError("model.source = 'hub' without model.name", "--model NAME; `slime models` lists them")
        code = (*MODEL_FILES, "*.py") if section.trust_remote_code else ()
        fetched = fetch_spec(expected, revision=section.revision, allow=code)
        source = fetched.folder
        notes |= {"repo": fetched.repo, "revision": fetched.revision, "commit": fetched.commit}
    if is_torch_dist(source):
        from slimecli.weights.convert import torch_dist_to_hf

        torch_dist_to_hf(source, run.model_dir, expected=expected)  # verified; what was interrupted is gone on with
        return run.model_dir
    check_folder(source, expected)
    with files.committed_folder(run.model_dir, notes) as folder:
        take_model(source, folder, code=section.trust_remote_code)
    return run.model_dir


def materialise_frozen(recipe: Recipe, run: RunDir) -> dict[str, Path]:
    """Role -> HF folder in the run, of every frozen model that is a Megatron checkpoint: verified, made once."""
    from slimecli.weights.convert import torch_dist_to_hf

    found: dict[str, Path] = {}
    for role, path in frozen_checkpoints(recipe).items():
        folder = run.frozen_dir(role)
        note = note_of(folder)
        if frozen_copy(run, role, path) is None:
            if not note.is_file() or files.read_json(note)["path"] != path:
                shutil.rmtree(folder, ignore_errors=True)  # of another checkpoint
                files.write_json(note, {"path": path})
            torch_dist_to_hf(Path(path).expanduser(), folder)  # what was interrupted is gone on with
        found[role] = folder
    return found


def take_model(source: Path, folder: Path, *, code: bool = False) -> None:
    """Link or copy a model's files, quantised weights as what they stand for; Python files only with `code`."""
    opened = open_weights(source)
    if isinstance(opened, Dequantized):
        save_hf_folder(opened.iterate(), folder, like=source)
        files.write_json(folder / "config.json", opened.config())
        for path in () if code else folder.glob("*.py"):
            path.unlink()
        return
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    heavy = [*sorted(source.glob("*.safetensors")), source / INDEX]
    for path in [p for p in heavy if p.is_file()]:
        try:
            os.link(path.resolve(), folder / path.name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, folder / path.name)
    for path in source.glob("*.py") if code else ():
        shutil.copyfile(path, folder / path.name)


def _init(recipe: Recipe, run: RunDir, folder: Path) -> dict[str, Any]:
    """New weights, with a tokenizer trained on the run's data or the model's own."""
    import torch

    from slimecli.weights.init import init_model

    section = recipe.model
    if section.path:
        shape = config_folder(Path(section.path).expanduser()) / "config.json"
        spec = from_config(files.read_json(shape), name="model.path")
    else:
        spec = get_spec(section.name)
    scratch = folder / "tokenizer"
    if section.tokenizer_vocab:
        from slimecli.data_tools.tokenizer import train_tokenizer

        scratch.mkdir()
        train_tokenizer(training_texts(run, recipe), section.tokenizer_vocab, scratch)
        tokenizer = scratch
    else:
        tokenizer = _own_tokenizer(section, spec)
    notes = init_model(
        spec,
        folder,
        seed=recipe.seed,
        std=section.init_std,
        tokenizer_dir=tokenizer,
        dtype=getattr(torch, section.dtype),
        # a published tokenizer uses fewer ids than the model has rows
        vocab_size=None if section.tokenizer_vocab else spec.vocab,
    )
    shutil.rmtree(scratch, ignore_errors=True)
    return notes


def _own_tokenizer(section: ModelSection, spec: ModelSpec) -> Path:
    if section.path:
        return config_folder(Path(section.path).expanduser())
    if not spec.repo:
        raise UsageError(
            f"{spec.name} has no published tokenizer", "--set model.tokenizer_vocab=300 trains one on the data"
        )
    return fetch_spec(spec, revision=section.revision, allow=TOKENIZER_FILES).folder


def training_texts(run: RunDir, recipe: Recipe) -> Iterator[str]:
    """Every text of the demonstrations, or of the prompts when there are none."""
    from slimecli.data_tools.formats import read_rows

    path = next((p for p in (run.data_dir / "sft.jsonl", run.data_dir / "train.jsonl") if p.is_file()), None)
    if path is None:
        raise MissingStageError(
            f"run {run.name} has no data to train a tokenizer on", f"slime prepare-data --run {run.quoted}"
        )
    data = recipe.data
    for row in read_rows(str(path)):
        for key in (data.messages_key, data.input_key, data.label_key):
            value = row.get(key)
            if isinstance(value, str):
                yield value
            elif isinstance(value, list):
                yield from (m["content"] for m in value if isinstance(m.get("content"), str))

"""What can be exported: any folder that holds a model's weights, whoever wrote it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slimecli.errors import DataError, UsageError
from slimecli.headers import is_torch_dist
from slimecli.rundir import RunDir
from slimecli.weights.hf import INDEX
from slimecli.weights.maps.rule import Rule

Pairs = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Weights and where they come from."""

    kind: str
    """what the folder is, in words"""
    path: Path
    """the folder that is read"""
    like: Path
    """HF folder with config and tokenizer"""
    weights: Callable[[Collection[str]], Pairs]
    """reads all tensors but those of the names given, one alive at a time, as often as it is called"""
    shapes: dict[str, tuple[int, ...]]
    """of all tensors"""
    dtype: str = ""
    """dtype of the result unless another one is asked for; empty: as stored"""
    facts: dict[str, Any] = field(default_factory=dict)
    """where the weights come from, for DONE.json"""


def hf_origin(path: Path, **changes: Any) -> Origin:
    """An HF folder; quantised weights are dequantised as they are read."""
    from slimecli.weights.quant import open_weights

    opened = open_weights(path)
    given: dict[str, Any] = {"kind": "HF folder", "like": path, "facts": {"source": str(path)}, **changes}
    return Origin(path=path, weights=opened.iterate, shapes=opened.shapes, **given)


def find_origin(path: Path) -> Origin:
    """The origin that a folder is: HF folder, trainer checkpoint of a run, or torch_dist checkpoint."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder", "name an HF folder, a checkpoint of a run or a torch_dist one")
    for folder in (path, path / "trainer"):
        if (folder / "state.json").is_file():
            return _trainer_origin(folder)
    if is_torch_dist(path):
        return _torch_dist_origin(path)
    if (path / INDEX).is_file() or any(path.glob("*.safetensors")):
        return hf_origin(path)
    raise DataError(
        f"{path} holds no weights: neither *.safetensors, nor a trainer's state.json, nor a torch_dist checkpoint",
        "name an HF folder, runs/NAME/checkpoints/step_N, or what Megatron saved into; a run goes by its name",
    )


def _torch_dist_origin(path: Path) -> Origin:
    """A Megatron checkpoint, put together tensor by tensor."""
    from slimecli.weights.convert import open_checkpoint
    from slimecli.weights.pieces import octets
    from slimecli.weights.torch_dist import TorchDistSource

    like = _companions(path)

    def weights(skip: Collection[str]) -> Pairs:
        stored, _, rules = open_checkpoint(path, like)
        with contextlib.closing(TorchDistSource(stored, rules)) as source:
            for name, shape in ((n, s) for n, s in _shapes(rules).items() if n not in skip):
                tensor = torch.empty(shape, dtype=source.dtype(name))
                source.read_into(name, 0, tensor.numel(), octets(tensor))
                yield name, tensor

    stored, _, rules = open_checkpoint(path, like)
    stored.close()
    facts = {"source": str(path)}
    kind = "torch_dist checkpoint"
    return Origin(kind=kind, path=path, like=like, weights=weights, shapes=_shapes(rules), facts=facts)


def _shapes(rules: list[Rule]) -> dict[str, tuple[int, ...]]:
    return {name: shape for rule in rules for name, shape in rule.hf.items()}


def _companions(checkpoint: Path) -> Path:
    from slimecli.weights.convert import find_companions
    from slimecli.weights.torch_dist import find_iteration

    find_iteration(checkpoint)
    try:
        return find_companions(checkpoint)
    except DataError as error:
        raise DataError(
            error.what,
            f"`slime convert --from {checkpoint} --to hf --hf DIR --out OUT` takes config and tokenizer from DIR",
        ) from None


def _trainer_origin(folder: Path) -> Origin:
    """Weights of a training checkpoint, in the precision of the optimizer; config and tokenizer are the run's."""
    from slimecli.trainers._checkpoint import stored_shapes, stored_weights

    run = next((RunDir(p) for p in folder.resolve().parents if (p / "run.json").is_file()), None)
    if run is None:
        raise UsageError(f"{folder} lies in no run, so its config is not known", "name it where it lies in its run")
    recipe = run.recipe()
    return Origin(
        kind="trainer checkpoint",
        path=folder,
        like=run.model_dir,
        weights=lambda skip: stored_weights(folder, skip),
        shapes=stored_shapes(folder),
        dtype=recipe.export.dtype or recipe.model.dtype,
        facts={"source": str(folder), "run": str(run.root)},
    )

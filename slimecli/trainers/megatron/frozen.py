"""Reference, teacher and old policy under Megatron: weights in host memory, swapped into the one live model; a teacher
of another architecture is a model of its own, whose weights come to the device while it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimecli.algos import algorithm
from slimecli.batch import TrainBatch
from slimecli.errors import UsageError
from slimecli.protocols import ModelName
from slimecli.recipe import Recipe
from slimecli.trainers._frozen import HostCopy, check_tokens, lacking, teacher_folder
from slimecli.trainers.megatron import runtime
from slimecli.trainers.megatron.arguments import settings_of, without_prediction
from slimecli.trainers.megatron.bridges import BRIDGES
from slimecli.trainers.megatron.layout import fits
from slimecli.trainers.megatron.model import build_chunks
from slimecli.trainers.megatron.network import Network
from slimecli.trainers.megatron.passes import Passes
from slimecli.trainers.megatron.prediction import PREFIX
from slimecli.weights.check import spec_of
from slimecli.weights.hf import HfFolder


class Frozen:
    """The frozen models that a recipe asks for."""

    def __init__(self, recipe: Recipe, bare: list[Any], folder: HfFolder, device: torch.device) -> None:
        """Leaves the policy's first weights in its chunks.

        Args:
            bare: the policy's chunks, unwrapped.
            folder: of the policy's first weights, which are the reference's.
        """
        spec, live = spec_of(folder), partial(_live, bare)
        self._copies: dict[ModelName, HostCopy] = {}
        self._other: OtherModel | None = None
        load = BRIDGES[recipe.trainer.bridge].load_hf
        teacher = teacher_folder(recipe)
        self._vocab = spec.vocab
        if teacher is not None:
            self._vocab = spec_of(HfFolder(teacher)).vocab
            if fits(spec_of(HfFolder(teacher)), spec):
                load(bare, HfFolder(teacher), spec)
                self._copies["teacher"] = HostCopy(live)
            else:
                self._other = OtherModel(recipe, teacher, device)
        load(bare, folder, spec)
        if recipe.algo.kl_coef > 0 and algorithm(recipe.algo.name).needs_rollout:
            self._copies["reference"] = HostCopy(live)
        if recipe.algo.old_log_probs == "published":
            self._copies["old_policy"] = HostCopy(live)

    def __contains__(self, name: ModelName) -> bool:
        return name in self._copies or (name == "teacher" and self._other is not None)

    def published(self) -> None:
        """The policy's weights of now are the old policy's."""
        if "old_policy" in self._copies:
            self._copies["old_policy"].refresh()

    @contextlib.contextmanager
    def ready(
        self, name: ModelName, policy: Network, passes: Passes, batch: TrainBatch
    ) -> Iterator[tuple[list[Any], Passes]]:
        """(chunks, passes) of a model, on the device inside.

        Args:
            passes: the policy's.
        """
        if name not in self:
            raise lacking(name)
        if name == "teacher":
            check_tokens(batch, self._vocab)
        if name == "teacher" and self._other is not None:
            with self._other.on_device() as chunks:
                yield chunks, self._other.passes
            return
        policy.gather()
        with self._copies[name].swapped_in():
            yield policy.chunks, passes


class OtherModel:
    """A model of another architecture than the policy's, divided over the ranks in the same layout."""

    def __init__(self, recipe: Recipe, folder: Path, device: torch.device) -> None:
        spec = spec_of(HfFolder(folder))
        try:
            settings = settings_of(without_prediction(recipe), spec, on_gpu=device.type == "cuda")
        except UsageError as error:
            raise UsageError(
                f"the teacher {folder} does not fit the policy's [megatron]: {error.what}",
                "choose a layout that both models can be divided into, or serve the teacher and set distill.url",
            ) from None
        if settings.layer_spec:
            raise UsageError(
                f"the teacher {folder} is of another architecture, and [megatron] spec is the policy's",
                "serve the teacher, and set distill.url",
            )
        bare = build_chunks(spec, settings, device)
        BRIDGES[recipe.trainer.bridge].load_hf(bare, HfFolder(folder), spec)
        self._chunks = [chunk.requires_grad_(False) for chunk in runtime.in_precision(bare)]
        section = recipe.trainer
        self.passes = Passes(
            settings, section.max_tokens_per_micro_batch, section.logits_chunk_tokens, spec.vocab, device
        )
        self._device = device
        self._waiting = [tensor.to("cpu") for tensor in _live(self._chunks)]
        self._put(self._waiting)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[list[Any]]:
        """The chunks, able to compute inside; afterwards only the host has their weights."""
        self._put([tensor.to(self._device) for tensor in self._waiting])
        try:
            yield self._chunks
        finally:
            self._put(self._waiting)

    def _put(self, values: list[Tensor]) -> None:
        for tensor, value in zip(_live(self._chunks), values, strict=True):
            tensor.data = value


def _live(chunks: list[Any]) -> list[Tensor]:
    """Parameters and buffers of this rank; a tied tensor once. Prediction layers, which log-probs are made without, are
    not among them."""
    seen: dict[int, Tensor] = {}
    for chunk in chunks:
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            if not name.startswith(PREFIX):
                seen.setdefault(id(tensor), tensor)
    return list(seen.values())

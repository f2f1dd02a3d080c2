"""The Megatron trainer: megatron-core models, schedules and optimizer behind the Trainer protocol.

Every rank is handed the whole batch. Data-parallel ranks take their share of the micro-batches, context-parallel ranks
their part of every sample, tensor-parallel ranks their part of every matrix, pipeline stages their layers.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimecli import env
from slimecli.algos import algorithm
from slimecli.batch import TrainBatch
from slimecli.errors import SlimeError
from slimecli.protocols import ModelName
from slimecli.recipe import Recipe
from slimecli.trainers import _optimizer, _parallel
from slimecli.trainers._loss import Tally, weighted_loss
from slimecli.trainers.megatron import checkpoint, runtime, weights
from slimecli.trainers.megatron.arguments import settings_of
from slimecli.trainers.megatron.host_copy import HostCopy
from slimecli.trainers.megatron.micro_batches import MicroBatch
from slimecli.trainers.megatron.model import build_chunks
from slimecli.trainers.megatron.passes import Passes, is_reporter
from slimecli.trainers.megatron.quiet import silence
from slimecli.trainers.megatron.replay import Routing
from slimecli.types import StepStats
from slimecli.weights.check import spec_of
from slimecli.weights.hf import HfFolder


class MegatronTrainer:
    """Satisfies slimecli.protocols.Trainer."""

    def __init__(self, recipe: Recipe, model_dir: Path, *, total_steps: int) -> None:
        env.set_threads(recipe.trainer.threads)
        env.set_cuda_connections()
        silence(on_gpu=torch.cuda.is_available())
        folder = HfFolder(model_dir)
        self._spec = spec_of(folder)
        self._model_dir = model_dir
        self._section = recipe.trainer
        self._algo = recipe.algo
        self._algorithm = algorithm(recipe.algo.name)
        self._total_steps = total_steps
        self._publish_dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        self._settings = settings_of(recipe, self._spec, on_gpu=torch.cuda.is_available())
        self._device, self._rank, self._world = runtime.start(self._settings, recipe.trainer.processes, recipe.seed)
        self._bare = build_chunks(self._spec, self._settings, self._device)
        weights.load_hf(self._bare, folder, self._spec)
        keeps_reference = recipe.algo.kl_coef > 0 and self._algorithm.needs_rollout
        self._reference = HostCopy(self._bare) if keeps_reference else None
        self._chunks = runtime.wrap(self._bare, self._settings)
        self._optimizer = runtime.make_optimizer(self._chunks, self._settings)
        self._passes = Passes(
            self._settings,
            recipe.trainer.max_tokens_per_micro_batch,
            recipe.trainer.logits_chunk_tokens,
            self._spec.vocab,
            self._device,
        )
        moe, layout = self._spec.moe, self._settings.layout
        replays = moe is not None and self._settings.transformer.get("moe_enable_routing_replay")
        self._routing = Routing(self._bare, moe.top_k, split=layout.sp) if moe and replays else None
        self._passes.routing = self._routing
        self._steps_done = 0
        self._gathered = True

    # -- protocol ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, model: ModelName = "policy") -> Tensor:
        """[T] float32 log-probability of each trained target; 0 where the loss mask is 0. On the CPU, on every rank."""
        self._gather()
        if model == "critic":
            raise SlimeError("the megatron trainer has no critic", "set trainer.backend to fsdp, or another algo.name")
        if model == "reference":
            if self._reference is None:
                raise SlimeError("this trainer holds no reference model", "set algo.kl_coef above 0")
            with self._reference.swapped_in(self._bare):
                return self._log_probs(batch)
        if self._routing is None:
            return self._log_probs(batch)
        self._routing.start_recording(batch, self._device)
        log_probs = self._log_probs(batch)
        self._routing.finish_recording(batch)
        return log_probs

    def _log_probs(self, batch: TrainBatch) -> Tensor:
        found: list[Tensor] = []

        def use(micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor, counts: bool) -> Tensor:
            if counts:
                found.append(log_probs)
            return log_probs.sum()

        with runtime.evaluating(self._chunks):
            shares = self._passes.run(self._chunks, batch, self._temperature(batch), use, forward_only=True)
        result = torch.zeros(batch.num_tokens, device=self._device)
        if is_reporter():
            for places, log_probs in zip(shares, found, strict=True):
                result[places.to(self._device)] = log_probs
        _parallel.add_up(result, self._world)
        return result.cpu()

    def step(self, batch: TrainBatch) -> StepStats:
        """One optimizer step."""
        number = self._steps_done + 1
        trained = int(batch.loss_mask.sum())
        if not trained:
            raise SlimeError(f"optimizer step {number}: no token of the batch is trained on", "look at the loss masks")
        if self._reference is not None and batch.ref_log_probs is None:
            raise SlimeError("the batch has no ref_log_probs", 'set them by Trainer.log_probs(batch, "reference")')
        tally = Tally()

        def use(micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor, counts: bool) -> Tensor:
            return weighted_loss(
                self._algorithm, self._algo, micro_batch.batch, log_probs, entropy, tally, counts=counts
            )

        runtime.zero_gradients(self._chunks, self._optimizer)
        replayed = self._routing.start_replay(batch) if self._routing else 0.0
        self._passes.run(self._chunks, batch, self._temperature(batch), use, forward_only=False)
        if self._routing:
            self._routing.finish_replay()
        runtime.check_gradients(self._chunks, number)
        lr = _optimizer.lr_at(number, self._total_steps, self._section)
        runtime.schedule(self._optimizer, lr, self._section.weight_decay)
        done, norm, _ = self._optimizer.step()
        if not done:
            raise SlimeError(f"optimizer step {number}: Megatron's optimizer refused it", "see the log above")
        self._steps_done, self._gathered = number, False
        sums, largest = _over_all_ranks(tally)
        loss = sums.pop("loss")
        means = {k: v / trained for k, v in sums.items()} | largest
        budget = self._section.max_tokens_per_micro_batch
        if self._routing:
            means["routing_replayed"] = replayed
        means["oversized_samples"] = float((batch.lengths > budget * self._settings.layout.cp).sum())
        weighted = int((batch.loss_weight != 0).sum())
        return StepStats(loss=loss, grad_norm=float(norm), lr=lr, tokens=weighted, metrics=means)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor in model.dtype), one tensor alive at a time. Collective: every rank must iterate."""
        self._gather()
        folder = HfFolder(self._model_dir)
        yield from weights.hf_tensors(self._bare, self._spec, self._publish_dtype, folder)
        for name, tensor in weights.carried(folder, self._spec):
            yield name, tensor.to(self._publish_dtype)

    def save(self, folder: Path) -> None:
        """A torch_dist checkpoint of weights, optimizer and schedule position."""
        self._gather()
        checkpoint.save(folder, self._bare, self._optimizer, self._steps_done, self._spec, self._model_dir)

    def load(self, folder: Path) -> None:
        """Inverse of save, at any layout."""
        self._steps_done = checkpoint.load(folder, self._bare, self._optimizer)

    def close(self) -> None:
        """Let go of all weights. Idempotent."""
        self.__dict__.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Have this rank's whole weights here, which overlap-param-gather puts off until the next training step."""
        if not self._gathered and self._settings.ddp.get("overlap_param_gather"):
            runtime.gather_parameters(self._chunks)
        self._gathered = True

    def _temperature(self, batch: TrainBatch) -> float:
        return batch.temperature if self._algorithm.needs_rollout else 1.0


def _over_all_ranks(tally: Tally) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima over the reporting ranks, told to all; the names are known on the last pipeline stage only."""
    mine = (
        {k: float(v) for k, v in tally.sums.items()},
        {k: float(v) for k, v in tally.largest.items()},
    )
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine if is_reporter() else None)
    sums: dict[str, float] = {}
    largest: dict[str, float] = {}
    for told in gathered:
        for name, value in (told or ({}, {}))[0].items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in (told or ({}, {}))[1].items():
            largest[name] = max(largest.get(name, 0.0), value)
    return sums, largest

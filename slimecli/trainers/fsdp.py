"""The FSDP trainer: a transformers model, packed micro-batches, AdamW; one process on a CPU up to many GPUs.

Master weights, gradients and optimizer state are float32. On a GPU the forward and backward passes run in model.dtype;
on a CPU in float32. With several processes the layers are sharded by FSDP2; every rank is handed the whole batch, takes
its share of the micro-batches, and the gradients are summed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from slimecli import env
from slimecli.algos import algorithm
from slimecli.batch import TrainBatch, plan_micro_batches
from slimecli.errors import SlimeError
from slimecli.recipe import Recipe
from slimecli.seeds import derive_seed
from slimecli.trainers import _checkpoint, _optimizer, _parallel
from slimecli.trainers._loss import Tally, weighted_loss
from slimecli.trainers._model import PolicyModel, load_model, named_weights
from slimecli.trainers._packing import pack
from slimecli.types import StepStats


class FsdpTrainer:
    """Satisfies slimecli.protocols.Trainer."""

    def __init__(self, recipe: Recipe, model_dir: Path, *, total_steps: int) -> None:
        env.set_threads(recipe.trainer.threads)
        self._section = recipe.trainer
        self._algo = recipe.algo
        self._algorithm = algorithm(recipe.algo.name)
        self._total_steps = total_steps
        self._seed = recipe.seed
        self._publish_dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        self._device, self._rank, self._world = _parallel.join(recipe.trainer.processes)
        self._policy = _parallel.place(load_model(recipe, model_dir), self._device, self._world, self._publish_dtype)
        self._reference: PolicyModel | None = None
        if recipe.algo.kl_coef > 0 and self._algorithm.needs_rollout:
            frozen = load_model(recipe, model_dir).requires_grad_(False)
            self._reference = _parallel.place(frozen, self._device, self._world, self._publish_dtype)
        self._parameters = {n.removeprefix("hf."): p for n, p in self._policy.named_parameters()}
        self._optimizer = _optimizer.make_optimizer(self._parameters, recipe.trainer)
        self._steps_done = 0

    # -- protocol ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, model: Literal["policy", "reference"] = "policy") -> Tensor:
        """[T] float32 log-probability of each trained target; 0 where the loss mask is 0. On the CPU, on every rank."""
        network = self._policy if model == "policy" else self._reference
        if network is None:
            raise SlimeError("this trainer holds no reference model", "set algo.kl_coef above 0")
        result = torch.zeros(batch.num_tokens, device=self._device)
        for indices in self._plan(batch):
            chosen = batch.select(indices or [0])
            log_probs, _ = self._forward(network, chosen)
            if indices:
                result[_positions(batch, indices).to(self._device)] = log_probs
        _parallel.add_up(result, self._world)
        return result.cpu()

    def step(self, batch: TrainBatch) -> StepStats:
        """One optimizer step."""
        trained = int(batch.loss_mask.sum())
        if not trained:
            raise SlimeError(
                f"optimizer step {self._steps_done + 1}: no token of the batch is trained on", "look at the loss masks"
            )
        if self._reference is not None and batch.ref_log_probs is None:
            raise SlimeError("the batch has no ref_log_probs", 'set them by Trainer.log_probs(batch, "reference")')
        tally = Tally()
        with _parallel.seeded(derive_seed(self._seed, "trainer", self._steps_done + 1, self._rank), self._device):
            for indices in self._plan(batch):
                self._accumulate(batch.select(indices or [0]), tally, counts=bool(indices))
        metrics = _parallel.reduce_metrics(tally.sums, tally.largest, self._world)
        norm = _optimizer.gradient_norm(self._parameters)
        _optimizer.check_gradient(float(norm), self._parameters, self._steps_done + 1)
        _optimizer.clip_gradient(norm, self._parameters, self._section.clip_grad)
        self._steps_done += 1
        lr = _optimizer.lr_at(self._steps_done, self._total_steps, self._section)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss = metrics.pop("loss")
        means = {k: v if k in tally.largest else v / trained for k, v in metrics.items()}
        budget = self._section.max_tokens_per_micro_batch
        means["oversized_samples"] = float((batch.lengths > budget).sum())
        weighted = int((batch.loss_weight != 0).sum())
        return StepStats(loss=loss, grad_norm=float(norm), lr=lr, tokens=weighted, metrics=means)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor in model.dtype), in the model's order; a tied tensor once."""
        for name, tensor in named_weights(self._policy):
            full = _parallel.whole(tensor.detach())
            yield name, full.to(self._publish_dtype) if isinstance(tensor, torch.nn.Parameter) else full

    def save(self, folder: Path) -> None:
        """Weights, optimizer and schedule position into an existing folder."""
        _checkpoint.save_state(folder, self._state(), self._steps_done, self._rank, self._world)

    def load(self, folder: Path) -> None:
        """Inverse of save, at any world size."""
        self._steps_done = _checkpoint.load_state(folder, self._state(), self._rank, self._world)
        for state in self._optimizer.state.values():
            state["step"].fill_(self._steps_done)

    def close(self) -> None:
        """Let go of all weights. Idempotent."""
        self.__dict__.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _plan(self, batch: TrainBatch) -> list[list[int]]:
        """Sample indices of this rank's micro-batches; an empty one is run without weight, for the collectives."""
        budget = self._section.max_tokens_per_micro_batch
        return plan_micro_batches(batch.lengths.tolist(), budget, self._world)[self._rank]

    def _forward(self, network: PolicyModel, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """[T] log-probs and [T] entropy of a micro-batch, 0 where not trained."""
        temperature = batch.temperature if self._algorithm.needs_rollout else 1.0
        packing = pack(batch, share=self._section.shared_prefix).to(self._device)
        values = network(packing, temperature)
        zeros = torch.zeros(batch.num_tokens, device=self._device)
        log_probs, entropy = (zeros.index_put((packing.places,), v[packing.predictions]) for v in values)
        return log_probs, entropy

    def _accumulate(self, batch: TrainBatch, tally: Tally, *, counts: bool) -> None:
        """Forward and backward of one micro-batch."""
        log_probs, entropy = self._forward(self._policy, batch)
        loss = weighted_loss(self._algorithm, self._algo, batch, log_probs, entropy, tally, counts=counts)
        loss.backward()  # type: ignore[no-untyped-call]

    def _state(self) -> dict[str, Tensor]:
        """KIND/NAME -> live tensor of everything that `save` keeps; creates Adam's moments where there are none yet."""
        state: dict[str, Tensor] = {f"weight/{n}": t for n, t in named_weights(self._policy)}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state[parameter]
            if not moments:
                moments["step"] = torch.zeros((), dtype=torch.float32, device=self._device)
                moments["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                moments["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for kind in ("exp_avg", "exp_avg_sq"):
                state[f"{kind}/{name}"] = moments[kind]
        return state


def _positions(batch: TrainBatch, indices: list[int]) -> Tensor:
    """[T'] positions in the batch of some samples' tokens."""
    bounds = batch.cu_seqlens.tolist()
    return torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in indices])

"""The FSDP trainer: a transformers model, packed micro-batches, AdamW; one process on a CPU up to many GPUs.

Master weights, gradients and optimizer state are float32. On a GPU the forward and backward passes run in model.dtype;
on a CPU in float32. With several processes the layers are sharded by FSDP2; every rank is handed the whole batch, takes
its share of the micro-batches, and the gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from slimecli import env
from slimecli.algos import algorithm
from slimecli.batch import TrainBatch, plan_micro_batches
from slimecli.errors import SlimeError
from slimecli.protocols import ModelName
from slimecli.recipe import Recipe
from slimecli.seeds import derive_seed
from slimecli.trainers import _checkpoint, _optimizer, _parallel
from slimecli.trainers._critic import Critic, ValueModel
from slimecli.trainers._frozen import HostCopy, check_tokens, lacking, teacher_folder
from slimecli.trainers._loss import Tally, weighted_loss
from slimecli.trainers._model import PolicyModel, load_model, named_weights
from slimecli.trainers._offload import DeviceHolder, Resting, awake
from slimecli.trainers._packing import pack
from slimecli.types import StepStats


class FsdpTrainer(DeviceHolder):
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
            self._reference = self._make_frozen(recipe, model_dir)
        folder = teacher_folder(recipe)
        self._teacher = None if folder is None else self._make_frozen(recipe, folder)
        self._parameters = {n.removeprefix("hf."): p for n, p in self._policy.named_parameters()}
        self._published: HostCopy | None = None
        if recipe.algo.old_log_probs == "published":
            self._published = HostCopy(lambda: [_parallel.local(p.detach()) for p in self._parameters.values()])
        self._optimizer = _optimizer.make_optimizer(self._parameters, recipe.trainer)
        self._critic: Critic | None = None
        if self._algorithm.returns is not None:
            self._critic = Critic(recipe, model_dir, self._device, self._world, self._publish_dtype)
        self._warmup = recipe.algo.critic_warmup * recipe.trainer.steps_per_rollout * (self._critic is not None)
        self._steps_done = 0
        self._resting = Resting(self, self._device)

    # -- protocol ----------------------------------------------------------------------------------------------------

    @awake
    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, model: ModelName = "policy") -> Tensor:
        """[T] float32 log-probability of each trained target, or the critic's value before it; 0 where the loss mask
        is 0. On the CPU, on every rank."""
        if model == "old_policy":
            return self._published_log_probs(batch)
        network = self._network(model)
        if model == "teacher" and self._teacher is not None:
            check_tokens(batch, self._teacher.hf.get_input_embeddings().weight.shape[0])
        return self._outputs(network, batch)

    def _published_log_probs(self, batch: TrainBatch) -> Tensor:
        """Those of the weights that were last published."""
        if self._published is None:
            raise lacking("old_policy")
        _parallel.reshard(self._policy)
        with self._published.swapped_in():
            log_probs = self._outputs(self._policy, batch)
            _parallel.reshard(self._policy)
        return log_probs

    def _outputs(self, network: PolicyModel | ValueModel, batch: TrainBatch) -> Tensor:
        """[T] first output of a model, on every rank."""
        result = torch.zeros(batch.num_tokens, device=self._device)
        for indices in self._plan(batch):
            chosen = batch.select(indices or [0])
            found, *_ = self._forward(network, chosen)
            if indices:
                result[batch.positions(indices).to(self._device)] = found
        _parallel.add_up(result, self._world)
        return result.cpu()

    @awake
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
        norm, lr, critic_norm = self._update()
        loss = metrics.pop("loss")
        means = {k: v if k in tally.largest else v / trained for k, v in metrics.items()}
        means |= {} if critic_norm is None else {"critic_grad_norm": critic_norm}
        budget = self._section.max_tokens_per_micro_batch
        means["oversized_samples"] = float((batch.lengths > budget).sum())
        weighted = int((batch.loss_weight != 0).sum())
        return StepStats(loss=loss, grad_norm=norm, lr=lr, tokens=weighted, metrics=means)

    @awake
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor in model.dtype), in the model's order; a tied tensor once.

        Iterated to the end, they are what `old_policy` is from then on.
        """
        for name, tensor in named_weights(self._policy):
            full = _parallel.whole(tensor.detach())
            yield name, full.to(self._publish_dtype) if isinstance(tensor, torch.nn.Parameter) else full
        if self._published is not None:
            self._published.refresh()

    @awake
    def save(self, folder: Path) -> None:
        """Weights, optimizer and schedule position into an existing folder."""
        _checkpoint.save_state(folder, self._state(), self._steps_done, self._rank, self._world)

    @awake
    def load(self, folder: Path) -> None:
        """Inverse of save, at any world size."""
        self._steps_done = _checkpoint.load_state(folder, self._state(), self._rank, self._world)
        _optimizer.set_steps(self._optimizer, max(self._steps_done - self._warmup, 0))
        if self._critic is not None:
            self._critic.resume(self._steps_done)
        if self._published is not None:
            self._published.refresh()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _plan(self, batch: TrainBatch) -> list[list[int]]:
        """Sample indices of this rank's micro-batches; an empty one is run without weight, for the collectives."""
        budget = self._section.max_tokens_per_micro_batch
        return plan_micro_batches(batch.lengths.tolist(), budget, self._world)[self._rank]

    def _network(self, name: ModelName) -> PolicyModel | ValueModel:
        held = {
            "policy": self._policy,
            "critic": None if self._critic is None else self._critic.model,
            "reference": self._reference,
            "teacher": self._teacher,
        }
        network = held[name]
        if network is None:
            raise lacking(name)
        return network

    def _make_frozen(self, recipe: Recipe, folder: Path) -> PolicyModel:
        model = load_model(recipe, folder, publishes=False).requires_grad_(False)
        return _parallel.place(model, self._device, self._world, self._publish_dtype)

    def _update(self) -> tuple[float, float, float | None]:
        """Optimizer step of the policy, unless only the critic learns yet, and of the critic: gradient norm, learning
        rate and the critic's gradient norm. No weight is touched before both gradients are seen to be numbers."""
        step = self._steps_done + 1
        norm = _optimizer.gradient_norm(self._parameters)
        _optimizer.check_gradient(float(norm), self._parameters, step)
        critic_norm = None if self._critic is None else self._critic.check(step)
        self._steps_done = step
        lr = _optimizer.lr_at(step, self._total_steps, self._section) if step > self._warmup else 0.0
        if step > self._warmup:
            _optimizer.clip_gradient(norm, self._parameters, self._section.clip_grad)
            _optimizer.advance(self._optimizer, lr)
        self._optimizer.zero_grad()
        if self._critic is not None and critic_norm is not None:
            self._critic.update(critic_norm, step, self._total_steps)
        return float(norm), lr, None if critic_norm is None else float(critic_norm)

    def _forward(self, network: PolicyModel | ValueModel, batch: TrainBatch) -> list[Tensor]:
        """[T] log-probs and [T] entropy of a micro-batch, or [T] values; 0 where not trained."""
        temperature = batch.temperature if self._algorithm.needs_rollout else 1.0
        packing = pack(batch, share=self._section.shared_prefix).to(self._device)
        zeros = torch.zeros(batch.num_tokens, device=self._device)
        found = network(packing, temperature)
        return [zeros.index_put((packing.places,), values[packing.predictions]) for values in found]

    def _accumulate(self, batch: TrainBatch, tally: Tally, *, counts: bool) -> None:
        """Forward and backward of one micro-batch."""
        log_probs, entropy = self._forward(self._policy, batch)
        loss = weighted_loss(self._algorithm, self._algo, batch, log_probs, entropy, tally, counts=counts)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._critic is not None:
            (values,) = self._forward(self._critic.model, batch)
            self._critic.accumulate(values, batch, tally, counts=counts)

    def _state(self) -> dict[str, Tensor]:
        """KIND/NAME -> live tensor of everything that `save` keeps; creates Adam's moments where there are none yet."""
        weights: dict[str, Tensor] = {f"weight/{n}": t for n, t in named_weights(self._policy)}
        critic = {} if self._critic is None else self._critic.state()
        return weights | _optimizer.moments(self._optimizer, self._parameters) | critic

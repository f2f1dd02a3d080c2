"""The critic of the FSDP trainer: the policy's body with one number per token, and an optimizer of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from slimecli.batch import TrainBatch
from slimecli.recipe import Recipe
from slimecli.trainers import _optimizer, _parallel
from slimecli.trainers._loss import Tally, weighted_value_loss
from slimecli.trainers._model import hidden_states, load_model
from slimecli.trainers._packing import Packing


class ValueModel(nn.Module):
    """A decoder without output embedding; its head starts at 0, so that the first advantages are the returns."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.hf = body
        self.head = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, packing: Packing, temperature: float) -> tuple[Tensor]:
        """[P] float32 values before each of the packing's predictions; the temperature plays no part."""
        rows = hidden_states(self.hf, packing).index_select(0, packing.rows)
        return (nn.functional.linear(rows.float(), self.head.weight.float()).squeeze(1),)


class Critic:
    """A value model in training. Its tensors on disk are named KIND/NAME with kinds that begin with `critic_`."""

    def __init__(self, recipe: Recipe, model_dir: Path, device: torch.device, world: int, dtype: torch.dtype) -> None:
        hf = load_model(recipe, model_dir).hf
        value_model = ValueModel(getattr(hf, hf.base_model_prefix), hf.config.hidden_size)
        self.model = _parallel.place(value_model, device, world, dtype)
        self._clip = recipe.algo.value_clip
        self._section = recipe.trainer.model_copy(update={"lr": recipe.algo.critic_lr or recipe.trainer.lr})
        self._parameters = {n.removeprefix("hf."): p for n, p in self.model.named_parameters()}
        self._optimizer = _optimizer.make_optimizer(self._parameters, self._section)

    def accumulate(self, values: Tensor, batch: TrainBatch, tally: Tally, *, counts: bool) -> None:
        """Backward pass of one micro-batch.

        Args:
            values: [T] with gradient, 0 where not trained.
            counts: False for a micro-batch that only keeps collectives in step.
        """
        loss = weighted_value_loss(values, batch, self._clip, tally, counts=counts)
        loss.backward()  # type: ignore[no-untyped-call]

    def check(self, step: int) -> Tensor:
        """[] gradient norm over all ranks; raises if it is no number."""
        norm = _optimizer.gradient_norm(self._parameters)
        _optimizer.check_gradient(float(norm), self._parameters, step)
        return norm

    def update(self, norm: Tensor, step: int, total_steps: int) -> None:
        """Optimizer step number `step`."""
        _optimizer.clip_gradient(norm, self._parameters, self._section.clip_grad)
        _optimizer.advance(self._optimizer, _optimizer.lr_at(step, total_steps, self._section))

    def state(self) -> dict[str, Tensor]:
        """KIND/NAME -> live tensor of all that is saved."""
        weights = {f"critic_weight/{name}": p.detach() for name, p in self._parameters.items()}
        moments = _optimizer.moments(self._optimizer, self._parameters)
        return weights | {f"critic_{name}": tensor for name, tensor in moments.items()}

    def resume(self, steps: int) -> None:
        """After its state was filled in: so many optimizer steps were made."""
        _optimizer.set_steps(self._optimizer, steps)

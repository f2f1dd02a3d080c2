"""A model in training, policy or critic: this rank's chunks, their gradient buffers and an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimecli.errors import SlimeError
from slimecli.model_specs import ModelSpec
from slimecli.recipe_sections import TrainerSection
from slimecli.trainers import _optimizer
from slimecli.trainers.megatron import checkpoint, runtime
from slimecli.trainers.megatron.arguments import Settings


class Network:
    """Every call is collective."""

    def __init__(self, bare: list[Any], settings: Settings, section: TrainerSection, *, rests: int = 0) -> None:
        """Args:
        bare: the chunks, with their weights.
        section: learning rate, its schedule and weight decay.
        rests: first steps in which it does not learn.
        """
        self.bare = bare
        self.chunks = runtime.wrap(bare, settings)
        self._optimizer = runtime.make_optimizer(self.chunks, settings)
        self._section = section
        self._rests = rests
        self._late = bool(settings.ddp.get("overlap_param_gather"))
        self._gathered = True

    def gather(self) -> None:
        """Have this rank's whole weights here, which overlap-param-gather puts off until the next training step."""
        if not self._gathered and self._late:
            runtime.gather_parameters(self.chunks)
        self._gathered = True

    def zero(self) -> None:
        """Before the first micro-batch of a step."""
        runtime.zero_gradients(self.chunks, self._optimizer)

    def check(self, step: int) -> None:
        """Raise if a gradient is no number."""
        runtime.check_gradients(self.chunks, step)

    def update(self, step: int, total_steps: int) -> tuple[float, float]:
        """Optimizer step number `step`, unless it rests: gradient norm before clipping and learning rate."""
        if step <= self._rests:
            self._optimizer.prepare_grads()
            return float(self._optimizer.get_grad_norm()), 0.0
        lr = _optimizer.lr_at(step, total_steps, self._section)
        runtime.schedule(self._optimizer, lr, self._section.weight_decay)
        done, norm, _ = self._optimizer.step()
        if not done:
            raise SlimeError(f"optimizer step {step}: Megatron's optimizer refused it", "see the log above")
        self._gathered = False
        return float(norm), lr

    def save(self, folder: Path, step: int, spec: ModelSpec, model_dir: Path | None) -> None:
        """A torch_dist checkpoint, as `checkpoint.save` has it."""
        self.gather()
        checkpoint.save(folder, self.bare, self._optimizer, step, spec, model_dir)

    def load(self, folder: Path) -> int:
        """Inverse of save, at any layout; returns the optimizer steps made."""
        return checkpoint.load(folder, self.bare, self._optimizer, rests=self._rests)

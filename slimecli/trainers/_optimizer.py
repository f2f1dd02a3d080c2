"""AdamW with a learning-rate schedule that is a function of the step number alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from slimecli.errors import SlimeError
from slimecli.recipe_sections import TrainerSection


def lr_at(step: int, total_steps: int, section: TrainerSection) -> float:
    """Learning rate of optimizer step `step` (from 1).

    Linear warm-up reaches the peak at `warmup_steps`; then constant, or down to lr * min_lr_ratio at `total_steps`.
    """
    if step <= section.warmup_steps:
        return section.lr * step / section.warmup_steps
    if section.lr_schedule == "constant":
        return section.lr
    span = max(total_steps - section.warmup_steps, 1)
    done = min((step - section.warmup_steps) / span, 1.0)
    share = 1 - done if section.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * share)


def make_optimizer(parameters: Mapping[str, Tensor], section: TrainerSection) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, because norms and biases set a scale that has no reason to shrink."""
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.adam_eps,
        fused=True,
    )


def advance(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One step at a learning rate; the gradients are used up."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """exp_avg/NAME and exp_avg_sq/NAME -> Adam's live moments; created where there are none yet."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        found |= {f"{kind}/{name}": state[kind] for kind in ("exp_avg", "exp_avg_sq")}
    return found


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let Adam's bias correction know how many steps its moments have seen."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)


def gradient_norm(parameters: Mapping[str, Tensor]) -> Tensor:
    """[] global L2 norm, over all ranks."""
    grads = [p.grad for p in parameters.values() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    full = getattr(norm, "full_tensor", None)
    return norm if full is None else full()


def check_gradient(norm: float, parameters: Mapping[str, Tensor], step: int) -> None:
    """Raise before the weights are touched if a gradient is NaN or infinite. Collective: every rank sees the norm."""
    if math.isfinite(norm):
        return
    bad = next((n for n, p in parameters.items() if p.grad is not None and not _finite(p.grad)), "of their sum")
    for p in parameters.values():
        p.grad = None
    raise SlimeError(
        f"optimizer step {step}: the gradient {bad} is NaN or infinite; the weights are as before the step",
        "resume from the last checkpoint with a lower trainer.lr, and look at the step's samples for broken log-probs",
    )


def _finite(grad: Tensor) -> bool:
    """True if the whole tensor is finite, asked on every rank alike."""
    total = grad.abs().max()
    full = getattr(total, "full_tensor", None)
    return bool(torch.isfinite(total if full is None else full()))


def clip_gradient(norm: Tensor, parameters: Mapping[str, Tensor], limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`; 0: leave them."""
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(list(parameters.values()), limit, norm)

"""Adam in the form that Megatron's torch_dist checkpoints of optimizers need: one step count per parameter group.

torch's own AdamW keeps a step per parameter, and megatron-core 0.16 cannot load a checkpoint of that. Transformer
Engine's and Apex's FusedAdam have this form; where they are not installed, this class does the same with torch's fused
kernel, so that its arithmetic is that of the FSDP trainer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw


class GroupAdamW(torch.optim.Optimizer):
    """AdamW; state per parameter: exp_avg and exp_avg_sq, state per group: step."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step on the gradients that are there."""
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            device = parameters[0].device
            steps = [torch.tensor(float(group["step"] - 1), device=device) for _ in parameters]
            adamw(
                parameters,
                [p.grad for p in parameters],
                [self.state[p]["exp_avg"] for p in parameters],
                [self.state[p]["exp_avg_sq"] for p in parameters],
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def install() -> None:
    """Let megatron-core use it where neither Transformer Engine nor Apex is installed."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as distributed

    if not optimizers.USING_PYTORCH_OPTIMIZER:
        return
    optimizers.Adam = distributed.Adam = GroupAdamW
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True

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


class HostAdamW(GroupAdamW):
    """The same for what optimizer_cpu_offload keeps in host memory: its class tells megatron-core where states are."""


def parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers in a chain of them."""
    found: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return found


def mend_offloaded(part: Any) -> None:
    """megatron-core 0.16 tells an offloaded optimizer to keep float32 copies of its weights, and on loading looks for
    one of each. The distributed optimizer's own weights are float32 already, so that there are none."""
    hybrid = part.optimizer
    if getattr(hybrid, "param_to_fp32_param", None) == {}:
        hybrid.param_update_in_fp32 = False


def make_moments(part: Any) -> None:
    """Have the moments there, zero where no step has made them: megatron-core cannot save an optimizer without.

    Args:
        part: one of Megatron's optimizers, not a chain of them.
    """
    if not is_offloaded(part):
        part.init_state_fn(part.optimizer, part.config)
        return
    for inner in part.optimizer.sub_optimizers:
        for p in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[p]:
                inner.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    part.optimizer._sync_sub_optimizers_state_to_hdo()


def is_offloaded(part: Any) -> bool:
    """Whether one of Megatron's optimizers has its state, or some of it, in host memory."""
    return part.init_state_fn is None


def go_on(part: Any, step: int) -> None:
    """After loading, let the optimizers inside an offloaded one know the weights, which megatron-core 0.16 only puts on
    the device, and how many steps their moments have seen: told to the outer one, it would say so before every step."""
    if not is_offloaded(part):
        return
    with torch.no_grad():
        for weight, in_host_memory in part.optimizer.gpu_params_map_cpu_copy.items():
            in_host_memory.copy_(weight)
    for inner in part.optimizer.sub_optimizers:
        for group in inner.param_groups:
            group["step"] = step


def install() -> None:
    """Let megatron-core use it where neither Transformer Engine nor Apex is installed, and always in host memory."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as distributed

    optimizers.CPUAdam = HostAdamW
    if not optimizers.USING_PYTORCH_OPTIMIZER:
        return
    optimizers.Adam = distributed.Adam = GroupAdamW
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True

"""Layer parts that megatron-core has not: norms after each branch (GLM-4), norms over all heads (MiniMax), experts
weighed by scores that are not normalised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from slimecli.model_specs import ModelSpec


def adapt(block: Any, spec: ModelSpec, first: int) -> Any:
    """megatron-core's layer specs of a pipeline part, with what this model has besides.

    Args:
        first: number of the part's first layer in the model.
    """
    # layers of one kind share a spec
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    for number, layer in enumerate(block.layer_specs, start=first):
        if spec.linear is not None and not spec.linear.is_full(number):
            from slimecli.trainers.megatron.gated_delta import DeltaAttention

            params = {"delta": spec.linear, "fused": spec.family.layout == "qwen3_next"}
            layer.submodules.self_attention = ModuleSpec(module=DeltaAttention, params=params)
        if spec.sandwich:
            layer.module = SandwichLayer
        if spec.qk_norm == "full":
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = ModuleSpec(module=FullNorm, params={"heads": spec.heads})
            attention.k_layernorm = ModuleSpec(module=FullNorm, params={"heads": spec.kv_heads})
    return block


def keep_scores(chunk: torch.nn.Module, scale: float) -> None:
    """Weigh experts by sigmoid scores as they are: megatron-core's routers divide those of the chosen by their sum.

    Args:
        scale: of all weights, as megatron-core applies it after dividing.
    """
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.routing = _with_scores(module.routing, scale)


def _with_scores(route: Callable[..., tuple[Tensor, Tensor]], scale: float) -> Callable[..., tuple[Tensor, Tensor]]:
    def routing(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = route(logits, *args, **kwargs)
        scores = torch.sigmoid(logits.view(chosen.shape).float()) * scale
        return (scores * chosen).to(weights.dtype), chosen

    return routing


class SandwichLayer(TransformerLayer):
    """A transformer layer whose branches are normalised before they are added to the residual."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        from megatron.core.models.gpt import gpt_layer_specs

        def norm() -> torch.nn.Module:
            made: torch.nn.Module = gpt_layer_specs.TENorm(config, config.hidden_size, config.layernorm_epsilon)
            return made

        self.post_self_attn_layernorm, self.post_mlp_layernorm = norm(), norm()
        self.self_attn_bda: Any = _normalised(self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda: Any = _normalised(self.mlp_bda, self.post_mlp_layernorm)


def _normalised(add: Callable[..., Any], norm: torch.nn.Module) -> Callable[..., Any]:
    """megatron-core's bias-dropout-add, with a norm on the branch's output first."""

    def build(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        inner = add(training, fused)

        def apply(branch: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = branch
            result: Tensor = inner((norm(output if bias is None else output + bias), None), residual, dropout)
            return result

        return apply

    return build


class FullNorm(torch.nn.Module):
    """RMSNorm over all heads of queries or keys together.

    Every tensor-parallel rank has the whole weight and uses that of its heads: megatron-core adds up the gradients of
    `q_layernorm` and `k_layernorm` over these ranks. Of fewer key heads than ranks, neighbouring ranks have the same.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self.group = parallel_state.get_tensor_model_parallel_group()
        self.width, self.eps = heads * hidden_size, eps
        self.copies = max(self.group.size() // heads, 1)
        self.weight = torch.nn.Parameter(torch.ones(self.width, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., local heads, head_dim], normalised over the heads of all ranks."""
        wide = x.flatten(-2).float()
        local = wide.shape[-1]
        weight = self.weight[self.group.rank() // self.copies * local :][:local]
        squares = _SummedBothWays.apply(wide.pow(2).sum(-1, keepdim=True), self.group)  # type: ignore[no-untyped-call]
        normal = wide * torch.rsqrt(squares / (self.copies * self.width) + self.eps)
        return (weight * normal.to(x.dtype)).view(x.shape)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Whole on every rank, in checkpoints under the name that slime's own module has there."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            None,
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        replace_prefix_for_sharding(sharded, prefix, prefix.replace("_layernorm.", "_norm."))
        return sharded


class _SummedBothWays(torch.autograd.Function):
    """All-reduce whose gradient is all-reduced too: a rank's share of the sum moves the outputs of all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None

"""Stand-ins for the Transformer Engine modules that megatron-core builds its models of, in plain torch.

megatron-core's model code for Transformer Engine (norms fused into the linear layer behind them, grouped experts,
replicated down-projections) is what slime trains with and what checkpoints are laid out for. Where Transformer Engine
is not installed (it needs a GPU even to import), these classes take its place behind megatron-core's own spec
functions. They have its parameter names, tensor-parallel axes and empty `_extra_state`, so that checkpoints are
interchangeable.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none
from torch import Tensor

from slimecli.trainers.megatron.core_attention import CoreAttention


class _Stateful(torch.nn.Module):
    """Has an `_extra_state` with nothing in it, as Transformer Engine's modules have outside fp8."""

    def get_extra_state(self) -> None:
        """Nothing."""
        return

    def set_extra_state(self, state: Any) -> None:
        """Nothing is all there can be."""


class Norm(_Stateful):
    """RMSNorm, or LayerNorm, as the config says."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.kind, self.unit = eps, config.normalization, config.layernorm_zero_centered_gamma
        make = torch.zeros if self.unit else torch.ones
        self.weight = torch.nn.Parameter(make(hidden_size, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalised over the last dimension."""
        if self.kind == "LayerNorm":
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, unit=self.unit)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit: bool) -> Tensor:
    """RMSNorm with the rounding steps of transformers, so that logits can be compared bit for bit.

    Args:
        unit: the weight is stored less one.
    """
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit:
        return (normal * (1.0 + weight.float())).to(x.dtype)
    return weight * normal.to(x.dtype)


class LayerNormColumnLinear(ColumnParallelLinear):
    """A norm and the column-parallel linear layer behind it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        make = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(make(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Linear(norm(input))."""
        config = self.config
        unit = config.layernorm_zero_centered_gamma
        normal = rms_norm(input_, self.layer_norm_weight, config.layernorm_epsilon, unit=unit)
        return super().forward(normal, *args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Rows are split, the norm's weight is whole on every rank."""
        return _sharded(self, prefix, {"weight": 0, "bias": 0}, sharded_offsets, self.tp_group, metadata)


class Linear(_Stateful):
    """A linear layer whose weight every tensor-parallel rank holds whole."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, tp_group: Any = None, **_: Any) -> None:
        super().__init__()
        # none is given for a replicated layer; its replicas are numbered within the tensor-parallel group all the same
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        config.init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """(output, no bias)."""
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Whole on every rank."""
        return _sharded(self, prefix, None, sharded_offsets, self.tp_group, metadata)


class _GroupedLinear(_Stateful):
    """One weight per local expert: `weight0`, `weight1`..."""

    axis = 0
    """dimension of a weight that expert tensor parallelism splits"""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        self.count, self.groups = num_gemms, pg_collection
        shape = [output_size, input_size]
        shape[self.axis] //= get_pg_size(pg_collection.expt_tp)
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            config.init_method(weight)
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=self.axis, stride=1)
            self.register_parameter(f"weight{i}", weight)
        self.register_load_state_dict_pre_hook(self._merge_states)  # type: ignore[no-untyped-call]

    def _merge_states(self, _: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        """A checkpoint has an `_extra_state` per expert, the module one for all."""
        for i in range(1, self.count):
            state.pop(f"{prefix}_extra_state{i}", None)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        """(outputs, no bias) of tokens sorted by expert."""
        parts = torch.split(x, m_splits)
        return torch.cat([F.linear(p, getattr(self, f"weight{i}")) for i, p in enumerate(parts)]), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Each expert is a slice of one tensor with a leading expert dimension."""
        first = get_pg_rank(self.groups.ep) * self.count
        experts = get_pg_size(self.groups.ep) * self.count
        out: dict[str, Any] = {}
        for i in range(self.count):
            shard = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{i}"), "_extra_state": None},
                prefix,
                {"weight": self.axis},
                (*sharded_offsets, (len(sharded_offsets), first + i, experts)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for tensor in shard.values():
                tensor.replica_id = (*tensor.replica_id[:2], get_pg_rank(self.groups.expt_dp))
            out[f"{prefix}weight{i}"] = shard[f"{prefix}weight"]
            out[f"{prefix}_extra_state{i or ''}"] = shard[f"{prefix}_extra_state"]
        return out


class ColumnGroupedLinear(_GroupedLinear):
    """Experts' first layer: expert tensor parallelism splits its rows."""


class RowGroupedLinear(_GroupedLinear):
    """Experts' second layer: expert tensor parallelism splits its columns."""

    axis = 1


class Provider(BackendSpecProvider):
    """What megatron-core asks for modules, answered from this file."""

    def linear(self) -> type:
        """Replicated."""
        return Linear

    def column_parallel_linear(self) -> Any:
        """megatron-core's own."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> Any:
        """megatron-core's own."""
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """As Transformer Engine."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Norm and linear layer in one."""
        return LayerNormColumnLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """By the config."""
        return Norm

    def core_attention(self) -> type:
        """Causal attention."""
        return CoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool | None = None) -> Any:
        """What makes experts: (module, its parts) for megatron-core 0.16; one callable for later versions, which know
        no legacy."""
        kind, first, second = SequentialMLP, ColumnParallelLinear, RowParallelLinear
        if moe_use_grouped_gemm:
            kind, first, second = TEGroupedMLP, ColumnGroupedLinear, RowGroupedLinear
        parts = MLPSubmodules(linear_fc1=first, linear_fc2=second)
        return partial(kind, submodules=parts) if moe_use_legacy_grouped_gemm is None else (kind, parts)

    def activation_func(self) -> Any:
        """The config's function."""
        return None


def install() -> None:
    """Let megatron-core's spec functions use the stand-ins; with Transformer Engine installed it keeps its own.

    The names are module attributes of megatron-core that are empty without Transformer Engine.
    """
    from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs, moe_module_specs
    from megatron.core.transformer import multi_latent_attention, transformer_block
    from megatron.core.transformer.moe import moe_utils

    for module in (experimental_attention_variant_module_specs, gpt_layer_specs, moe_module_specs):
        module.TESpecProvider = Provider
    gpt_layer_specs.TENorm = transformer_block.TENorm = Norm
    multi_latent_attention.TELinear = Linear
    if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16 names it even where it is not defined
        moe_utils.te_general_gemm = None


def _sharded(
    module: torch.nn.Module, prefix: str, axes: dict[str, int] | None, offsets: Any, group: Any, metadata: Any
) -> dict[str, Any]:
    state = module.state_dict(prefix="", keep_vars=True)
    sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        state, prefix, axes, offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
    )
    return sharded

"""Stand-ins for the Transformer Engine modules that megatron-core builds GPU models of, in plain torch.

The checkpoint layout that slime writes is that of models built with `--transformer-impl transformer_engine`: norms
fused into the linear layer behind them (`linear_qkv.layer_norm_weight`), grouped experts (`linear_fc1.weight3`),
replicated down-projections. Transformer Engine needs a GPU even to import, so these classes take its place behind
megatron-core's own spec functions. They have TE's parameter names, tensor-parallel axes and empty `_extra_state`;
megatron-core's attention, MLP, MoE, MLA, MTP and `sharded_state_dict` code around them is the real one.

`install()` changes module attributes of megatron-core: call it in a forked child only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size


class _Stateful(torch.nn.Module):
    """Has an `_extra_state` with nothing in it, as TE modules have outside fp8."""

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: Any) -> None:
        assert state is None or state == [None], state


class Norm(_Stateful):
    """TENorm: RMSNorm or LayerNorm as the config says."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.kind = eps, config.normalization
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "LayerNorm":
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm with the rounding steps of transformers, so that logits can be compared bit for bit."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class LayerNormColumnLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear: a norm and the column-parallel linear layer behind it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        eps = self.config.layernorm_epsilon
        return super().forward(rms_norm(input_, self.layer_norm_weight, eps), *args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class Linear(_Stateful):
    """TELinear with parallel_mode `duplicated`: every tensor-parallel rank holds the whole weight."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        config.init_method(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class _GroupedLinear(_Stateful):
    """TEGroupedLinear: one weight per local expert, `weight0`, `weight1`..."""

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
            self.register_parameter(f"weight{i}", weight)
        # a checkpoint has a state per expert, the module one for all
        self.register_load_state_dict_pre_hook(self._merge_states)

    def _merge_states(self, _: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for i in range(1, self.count):
            state.pop(f"{prefix}_extra_state{i}", None)

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        parts = torch.split(x, m_splits)
        return torch.cat([F.linear(p, getattr(self, f"weight{i}")) for i, p in enumerate(parts)]), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
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
    """TEColumnParallelGroupedLinear."""


class RowGroupedLinear(_GroupedLinear):
    """TERowParallelGroupedLinear."""

    axis = 1


class CoreAttention(torch.nn.Module):
    """TEDotProductAttention on torch's SDPA: [sequence, batch, heads, dim], causal, grouped queries."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


class Provider(BackendSpecProvider):
    """What TESpecProvider returns, from this file."""

    def linear(self) -> type:
        return Linear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return CoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> Any:
        if moe_use_grouped_gemm:
            return TEGroupedMLP, MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    def activation_func(self) -> Any:
        return None


def install() -> None:
    """Let megatron-core's spec functions use the stand-ins."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs, moe_module_specs
    from megatron.core.transformer import multi_latent_attention, transformer_block

    for module in (experimental_attention_variant_module_specs, gpt_layer_specs, moe_module_specs):
        module.TESpecProvider = Provider
    gpt_layer_specs.TENorm = transformer_block.TENorm = Norm
    multi_latent_attention.TELinear = Linear

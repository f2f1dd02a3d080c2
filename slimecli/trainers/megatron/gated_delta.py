"""Gated DeltaNet layers (arXiv 2412.06464) as attention of a megatron-core layer, under the names HF gives their parts.

Every tensor-parallel rank holds the layer whole and computes all of it, as slime does; context-parallel ranks compute
whole samples too, and each keeps its own positions. Samples of a micro-batch do not see each other.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimecli.model_specs.spec import GatedDelta
from slimecli.trainers.megatron.core_attention import global_order

CHUNK = 64
"""tokens whose updates of the state are solved for together"""


class DeltaAttention(nn.Module):
    """[L, 1, H] hidden states of packed samples -> [L, 1, H], with the norm before it."""

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        *,
        delta: GatedDelta,
        fused: bool,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        from megatron.core.models.gpt import gpt_layer_specs

        self.config, self.groups = config, pg_collection
        norm = gpt_layer_specs.TENorm(config, config.hidden_size, config.layernorm_epsilon)
        self.input_layernorm: nn.Module = norm
        self.linear_attn = DeltaNet(config, delta, fused=fused)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """(output, no bias)."""
        from megatron.core.tensor_parallel.mappings import (
            gather_from_sequence_parallel_region,
            scatter_to_sequence_parallel_region,
        )

        config = self.config
        x = self.input_layernorm(hidden_states)
        if config.sequence_parallel:
            # every rank computes the same from all positions: gradients are the same too, and need no adding up
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self.groups.tp)
        rows = x[:, 0]
        bounds = packed_seq_params.cu_seqlens_q.tolist() if packed_seq_params is not None else [0, len(rows)]
        own: Tensor | None = None
        if config.context_parallel_size > 1:
            order = global_order(bounds, config.context_parallel_size).to(rows.device)
            local, rank = len(rows), self.groups.cp.rank()
            own = torch.argsort(order)[rank * local : (rank + 1) * local]
            # a rank's outputs are its own positions; what they say of other positions is added up on the way back
            rows = gather_from_sequence_parallel_region(rows.contiguous(), group=self.groups.cp)[order]
        out = torch.cat([self.linear_attn(rows[a:b]) for a, b in pairwise(bounds)])
        out = (out if own is None else out[own])[:, None]
        if config.sequence_parallel:
            out = scatter_to_sequence_parallel_region(out, group=self.groups.tp)
        return out, None


class DeltaNet(nn.Module):
    """One sample's tokens through convolution, gated delta rule, gated norm and output projection."""

    def __init__(self, config: Any, delta: GatedDelta, *, fused: bool) -> None:
        """Args:
        fused: one projection for q, k, v, z and one for b, a, rows of a key head together; else one for q, k, v.
        """
        super().__init__()
        self.delta, self.eps, self.fused = delta, config.layernorm_epsilon, fused
        keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
        hidden, dtype, heads = config.hidden_size, config.params_dtype, delta.value_heads
        inputs = (
            {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}
            if fused
            else {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        )
        self.inputs = tuple(inputs)
        for name, rows in inputs.items():
            self.add_module(name, nn.Linear(hidden, rows, bias=False, dtype=dtype))
        mixed = 2 * keys + values
        self.conv1d = nn.Conv1d(mixed, mixed, delta.conv, groups=mixed, bias=False, dtype=dtype)
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.zeros(heads, dtype=dtype))
        self.norm = _Weight(delta.value_dim, dtype)
        self.out_proj = nn.Linear(values, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[L, H] -> [L, H]."""
        delta = self.delta
        projected = [self.get_submodule(name)(x) for name in self.inputs]
        q, k, v, z, b, a = (self._grouped if self.fused else self._plain)(*projected)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], 1)
        padded = F.pad(mixed.T, (delta.conv - 1, 0))[None]
        mixed = F.silu(self.conv1d(padded)[0].T)
        keys = delta.key_heads * delta.key_dim
        q, k, v = torch.split(mixed, [keys, keys, delta.value_heads * delta.value_dim], 1)
        log_decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        repeats = delta.value_heads // delta.key_heads
        q, k = (_unit(t.reshape(len(x), delta.key_heads, -1).float()).repeat_interleave(repeats, 1) for t in (q, k))
        out = gated_delta_rule(
            q * delta.key_dim**-0.5,
            k,
            v.reshape(len(x), delta.value_heads, -1).float(),
            log_decay,
            b.float().sigmoid(),
        ).to(x.dtype)
        wide = out.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        gated = (self.norm.weight * normal.to(x.dtype)) * F.silu(z.reshape(out.shape).float())
        result: Tensor = self.out_proj(gated.to(x.dtype).flatten(1))
        return result

    def _plain(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        keys = self.delta.key_heads * self.delta.key_dim
        values = self.delta.value_heads * self.delta.value_dim
        return *torch.split(qkv, [keys, keys, values], 1), z, b, a

    def _grouped(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
        delta, length = self.delta, len(qkvz)
        per_key = delta.value_heads // delta.key_heads
        parts = [delta.key_dim, delta.key_dim, per_key * delta.value_dim, per_key * delta.value_dim]
        q, k, v, z = torch.split(qkvz.view(length, delta.key_heads, -1), parts, 2)
        b, a = torch.split(ba.view(length, delta.key_heads, -1), [per_key, per_key], 2)
        return q, k, v, z, b.flatten(1), a.flatten(1)


class _Weight(nn.Module):
    """A norm's weight, applied by the layer."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """[L, heads, value dim] outputs o_t = S_t' q_t of one sample, in float32, of a state (key dim x value dim)

        S_t = d_t S_{t-1} + k_t u_t'        u_t = beta_t (v_t - d_t S_{t-1}' k_t)        d_t = exp(log_decay_t)

    Inside a chunk, with D_i the decay from its begin up to i, the u of all its tokens solve a triangular system:

        u_i + beta_i sum_{j<i} (D_i / D_j) (k_i . k_j) u_j = beta_i (v_i - D_i S_0' k_i)

    Args:
        q, k: [L, heads, key dim].
        v: [L, heads, value dim].
        log_decay, beta: [L, heads].
    """
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    state = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    out = []
    for begin in range(0, q.shape[1], CHUNK):
        part = slice(begin, begin + CHUNK)
        qs, ks, vs = q[:, part], k[:, part], v[:, part]
        b, total = beta[part].T[..., None], log_decay[part].T.cumsum(1)[..., None]
        between = (total - total.transpose(1, 2)).tril().exp()
        system = (b * between * (ks @ ks.transpose(1, 2))).tril(-1)
        right = b * (vs - total.exp() * (ks @ state))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        out.append(total.exp() * (qs @ state) + ((qs @ ks.transpose(1, 2)) * between).tril() @ u)
        last = total[:, -1:]
        state = last.exp() * state + (ks * (last - total).exp()).transpose(1, 2) @ u
    return torch.cat(out, 1).transpose(0, 1)


def _unit(x: Tensor) -> Tensor:
    """Rows of length one."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)

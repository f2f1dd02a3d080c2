"""Which weights tensor-parallel ranks hold parts of, where Transformer Engine has said something else."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from slimecli.trainers.megatron import model


class TransformerEngineLinear(nn.Module):
    """Its `Linear` as far as marks go: all weights are called parts, whatever the mode."""

    def __init__(self, parallel_mode: str | None) -> None:
        super().__init__()
        self.parallel_mode = parallel_mode
        self.weight = nn.Parameter(torch.zeros(2, 2))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)


def test_a_weight_that_every_rank_has_whole_is_counted_once_in_gradient_norms():
    """Latent attention's down-projections; experts' weights are parts, though their modules are told of no mode."""
    layer = nn.Module()
    layer.linear_q_down_proj = TransformerEngineLinear(None)
    layer.linear_q_up_proj = TransformerEngineLinear("column")
    layer.experts = nn.Module()
    layer.experts.linear_fc1 = TransformerEngineLinear(None)
    model._mark_split(layer)
    marked = {name: p.tensor_model_parallel for name, p in layer.named_parameters()}
    assert marked == {
        "linear_q_down_proj.weight": False,
        "linear_q_up_proj.weight": True,
        "experts.linear_fc1.weight": True,
    }

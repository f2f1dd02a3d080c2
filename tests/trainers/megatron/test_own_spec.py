"""`[megatron] spec`: own layers in place of slime's, with the same weights."""

from __future__ import annotations

import numpy as np

from tests.trainers.megatron.ranks import megatron, observe


def same(config, vp_stage):
    """megatron-core's own block, as slime takes it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def without_mlp(config, vp_stage):
    """Layers that drop what their MLP says."""
    block = same(config, vp_stage)
    for layer in block.layer_specs:
        layer.submodules.mlp_bda = lambda training, fused: lambda output, residual, dropout: residual
    return block


def test_an_own_spec_makes_the_layers(model_of):
    folder = model_of("qwen3")
    ours, again, other = (
        observe(folder, (*megatron(), *spec))["log_probs"][0]
        for spec in ((), (f"megatron.spec={__name__}:same",), (f"megatron.spec={__name__}:without_mlp",))
    )
    np.testing.assert_array_equal(ours, again)
    assert np.abs(ours - other).max() > 0.01

"""Slime's Megatron checkpoints held against megatron-core 0.16.1 and mbridge 0.15.1 themselves, on CPU and gloo.

test_load: megatron-core's loader puts what slime wrote into its own models, bit for bit, at TP, PP, EP and mixes.
test_logits: these models then compute what transformers computes.
test_back: what megatron-core wrote (any layout, stacked or numbered layers, with optimizer state) converts back to HF.
test_layouts: the same both ways for families whose modules are slime's own, on shards made by hand.
test_trainers: what a trainer saved is loaded likewise, Adam's state by an optimizer of megatron-core's.
test_mbridge: mbridge's mapping gives the same tensors, for each family it knows.

The expected tensors (expected.py, and the shards of test_layouts) share no code with slime's weight maps. Both packages
are part of the test environment (`pip install -e .[dev]`); where they are missing, these tests fail on import.
"""

import warnings
from unittest import mock

import torch

with mock.patch.object(torch, "compile", lambda function, *_, **__: function), warnings.catch_warnings():
    # megatron-core compiles its small functions when they are first called, which takes a C++ compiler and minutes; and
    # it warns of Transformer Engine and Apex being absent
    warnings.simplefilter("ignore")
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    import slimecli.trainers.megatron.stand_ins
    import slimecli.trainers.megatron.trainer  # noqa: F401

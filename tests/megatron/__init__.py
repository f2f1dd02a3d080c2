"""Slime's Megatron checkpoints held against megatron-core and mbridge themselves, on CPU and gloo.

Both are part of the test environment (`pip install -e .[dev]`); where they are missing, these tests fail on import.
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

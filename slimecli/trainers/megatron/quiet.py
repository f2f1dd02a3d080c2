"""Warnings of megatron-core and torch that nobody has to act upon. All others are shown."""

from __future__ import annotations

import warnings

_CORE = r"megatron\.core\."
HARMLESS: tuple[tuple[type[Warning], str, str, str], ...] = (
    (
        UserWarning,
        "Transformer Engine and Apex are not installed",
        _CORE,
        "our own take their place",
    ),
    (UserWarning, "Apex is not installed", _CORE, "our own norms take its place"),
    (UserWarning, "full scope is deprecated", _CORE, "said of megatron-core's own default"),
    (
        UserWarning,
        r"The \.grad attribute of a Tensor that is not a leaf",
        r"slimecli\.trainers\.megatron\.cpu_device",
        "pipeline stages read the gradients of what they received, which are there",
    ),
    (FutureWarning, r"`torch\.distributed\.\w+` is deprecated", r"torch\.distributed\.", "megatron-core's calls"),
    (FutureWarning, "`(load|save)_state_dict` is deprecated", _CORE, "megatron-core's calls"),
)
"""(kind, start of the message, module it is blamed on, why it says nothing)"""
ON_CPU: tuple[tuple[type[Warning], str, str, str], ...] = (
    (UserWarning, r".*CUDA_DEVICE_MAX_CONNECTIONS", _CORE, "there is no GPU to connect to"),
)


def silence(*, on_gpu: bool) -> None:
    """Leave the warnings above out, in this process: a trainer's own."""
    for kind, message, module, _ in HARMLESS if on_gpu else HARMLESS + ON_CPU:
        warnings.filterwarnings("ignore", message=message, category=kind, module=module)

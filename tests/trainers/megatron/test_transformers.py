"""Log-probs and gradients of every family are transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimecli import files
from slimecli.batch import TrainBatch
from slimecli.trainers import open_trainer
from tests.models import FAMILIES, tiny_model
from tests.trainers import made
from tests.trainers.megatron.conftest import tame
from tests.trainers.megatron.ranks import megatron, weights_of
from tests.trainers.processes import run_ranks

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f: (f, {}) for f in ("qwen2", "qwen3", "llama", "mimo", "glm4", "qwen3_moe", "glm4_moe", "minimax_m2")},
    **{f: (f, {}) for f in ("mixtral", "qwen2_moe", "deepseek_v3", "moonlight", "kimi_k2")},
    # transformers norms latents with 1e-6 whatever the config says; SGLang and Megatron-LM with the config's value
    "glm4_moe_lite": ("glm4_moe_lite", {"rms_norm_eps": 1e-6}),
    **{f: (f, {}) for f in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    "llama without scaling": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama with one key head": ("llama", {"num_key_value_heads": 1}),
    "glm4 half rotated": ("glm4", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "deepseek_v3 with yarn": ("deepseek_v3", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "deepseek_v3 with groups": (
        "deepseek_v3",
        {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8},
    ),
    "moonlight with yarn": ("moonlight", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "qwen3_moe not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "deepseek_v3 not normalised": ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.8}),
    "glm4_moe not normalised": ("glm4_moe", {"norm_topk_prob": False}),
    "qwen2_moe normalised": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen2_moe with dense layers, without biases": ("qwen2_moe", {"mlp_only_layers": [0], "qkv_bias": False}),
    "qwen3_moe with dense layers": ("qwen3_moe", {"mlp_only_layers": [0]}),
}
OPTIONS = ("algo.name=sft", "trainer.lr=1e6", "trainer.adam_eps=1e6", "trainer.beta1=0", "trainer.clip_grad=0")
"""a step by the gradient itself, of the mean log-prob"""


def by_transformers(folder: Path, family: str, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[T] log-probs, and the model's weights less the gradient of the weighted loss, by the names of its files."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    # the repositories of some families bring their own code, which computes as transformers' class does
    stated = files.read_json(folder / "config.json") | {"model_type": FAMILIES[family][0]}
    config = AutoConfig.for_model(**stated)
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    model = auto.from_pretrained(folder, config=config, dtype=torch.float32)
    rows = []
    for begin, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        ids = batch.tokens[begin:end]
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        log_probs = logits.log_softmax(1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        rows.append(torch.nn.functional.pad(log_probs, (0, 1)))
    log_probs = torch.cat(rows) * batch.loss_mask
    (-log_probs * batch.loss_weight).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    model.save_pretrained(folder / "stepped")
    return log_probs.detach(), load_file(folder / "stepped" / "model.safetensors")


def by_megatron(folder: Path, options: tuple[str, ...]) -> tuple[np.ndarray, dict[str, np.ndarray], float]:
    """The same from a trainer, and its gradient norm; on one rank."""
    recipe = made.recipe(*options)
    batch = made.batch(recipe)
    trainer = open_trainer(recipe, folder, total_steps=10)
    log_probs = trainer.log_probs(batch).numpy().copy()
    norm = trainer.step(batch).grad_norm
    return log_probs, weights_of(trainer), norm


@pytest.mark.parametrize("case", CASES)
def test_log_probs_and_gradients(tmp_path, case):
    family, changes = CASES[case]
    folder = tame(tiny_model(tmp_path, family, **changes), family)
    options = (*OPTIONS, *megatron())
    batch = made.batch(made.recipe(*options))
    log_probs, stepped, norm = run_ranks(1, by_megatron, folder, options, join=False)[0]
    expected, theirs = by_transformers(folder, family, batch)
    assert np.abs(log_probs - expected.numpy()).max() < 1e-5
    assert norm > 0.1
    before = load_file(folder / "model.safetensors")
    assert set(stepped) == set(before) - ({"lm_head.weight"} if "lm_head.weight" not in stepped else set())
    for name, weight in stepped.items():
        moved = (theirs[name] - before[name]).norm()
        error = (torch.from_numpy(weight) - theirs[name]).norm()
        assert error <= 2e-5 * moved + 2e-6, (name, float(error), float(moved))

"""mbridge's HF -> Megatron mapping, run on the same tiny models: what it loads equals what slime writes, bit for bit.

mbridge 0.15.1 maps these text models: llama, qwen2, qwen2_moe, qwen3, qwen3_moe, mixtral, mimo, glm4_moe, deepseek_v3
(and the vision-language gemma3, glm4v, glm4v_moe, internvl_chat, qwen2_5_vl). Compared here is each text model, and
their prediction layers. MiMo's `input_proj` is the one difference, and on purpose: MiMo multiplies it
with [hidden state | embedding] (so do SGLang and vLLM), megatron-core with [embedding | hidden state]; mbridge does
not swap the halves.

mbridge has no mapping for GLM-4, GLM-4.7-Flash, GLM-5, MiniMax-M2, Qwen3-Next, Qwen3.5 and Kimi K2: these rest on the
other tests of this folder.

Its Qwen2-MoE bridge maps the shared expert's gate but builds a model without one: the test says that there is one.

Its DeepSeek bridge accepts a prediction layer only as number 61 of 61 (names and asserts are literal), MiMo's fails
to build one (a config is handed on in place of a layer spec) and GLM's does not try. So for prediction layers the
model is ours (models.py) and mbridge loads it.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from safetensors.torch import save_file

from slimecli.model_specs import families
from slimecli.weights.convert import hf_to_torch_dist
from tests.megatron.harness import World, run
from tests.megatron.models import PADDED, config_of, hub_folder, is_moe, megatron_model, tensors_of
from tests.megatron.test_load import load

CPU = {
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
}
MOE_CPU = {"moe_token_dispatcher_type": "allgather", "moe_shared_expert_overlap": False, "variable_seq_lengths": False}
"""the default dispatcher makes CUDA streams"""


def _bridge(config: dict[str, Any]) -> Any:
    """mbridge's own bridge of this model type."""
    from mbridge.core.auto_bridge import AutoBridge
    from mbridge.core.safetensor_io import SafeTensorIO
    from mbridge.models import DeepseekV3Bridge
    from transformers import PretrainedConfig

    # megatron-core 0.16 renamed the argument
    DeepseekV3Bridge.TransformerConfigClass = staticmethod(
        lambda max_position_embeddings, **settings: MLATransformerConfig(
            original_max_position_embeddings=max_position_embeddings, **settings
        )
    )
    # transformers 5 keeps rope_theta inside rope_parameters; mbridge looks for what stands in config.json
    hf_config = PretrainedConfig()
    for name, value in config.items():
        setattr(hf_config, name, value)
    padding = {} if config["vocab_size"] == PADDED else {"make_vocab_size_divisible_by": PADDED}
    bridge = AutoBridge.from_config(hf_config, **padding)
    # its reader for DeepSeek dequantises fp8 with a GPU kernel; these weights are not quantised
    bridge._get_safetensor_io = lambda path: SafeTensorIO(str(path))
    bridge.set_extra_args(**CPU, **(MOE_CPU if is_moe(config) else {}))
    if config["model_type"] == "qwen2_moe":
        bridge.set_extra_args(moe_shared_expert_gate=True)
    return bridge


def _weights(model: Any) -> dict[str, torch.Tensor]:
    tensors = model.state_dict().items()
    return {n: t for n, t in tensors if isinstance(t, torch.Tensor) and "_extra_state" not in n}


def _compare(bridge: Any, model: Any, hf: Path, megatron: Path, *, swapped: str = "") -> None:
    """Let mbridge load `hf`, then megatron-core load `megatron`, into the same model."""
    with torch.no_grad():
        bridge.load_weights([model], str(hf))
        theirs = {name: tensor.clone() for name, tensor in _weights(model).items()}
        for tensor in _weights(model).values():
            tensor.fill_(float("nan"))
    load(model, megatron, prediction=bool(model.config.mtp_num_layers))
    if swapped:
        theirs[swapped] = torch.cat(theirs[swapped].chunk(2, dim=1)[::-1], dim=1)
    assert len(theirs) > 20
    for name, tensor in _weights(model).items():
        assert torch.equal(tensor, theirs[name]), name


def _plain_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """config.json in the words of the hub's files, which transformers 5 no longer writes."""
    config = config_of(folder)
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    return {**config, **config["rope_parameters"], "rope_scaling": None, **changes}


def _unpadded(folder: Path, family: str) -> tuple[Path, Path]:
    """HF folder and Megatron checkpoint of a model with as many tokens as Megatron has rows."""
    hf = hub_folder(folder / "hf", family, vocab=PADDED)
    hf_to_torch_dist(hf, folder / "megatron")
    return hf, folder / "megatron" / "release"


def _load_own(_: World, config: dict[str, Any], hf: Path, megatron: Path) -> None:
    """Into megatron-core's model as mbridge sets it up."""
    bridge = _bridge(config)
    _compare(bridge, bridge._model_provider([])(pre_process=True, post_process=True), hf, megatron)


FAMILIES = ["qwen2", "qwen3", "llama", "mimo", "qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_mbridge_loads_the_same_tensors(tmp_path, hub, converted, family):
    if family == "deepseek_v3":  # its bridge for DeepSeek cannot pad the vocabulary
        hf, megatron = _unpadded(tmp_path, family)
    else:
        hf, megatron = hub(family), converted(family)
    run(World(), _load_own, _plain_config(hf, num_nextn_predict_layers=0), hf, megatron)


MULTI_MODAL = {"gemma3", "glm4v", "glm4v_moe", "internvl_chat", "qwen2_5_vl"}


def test_every_text_model_of_mbridge_is_one_of_slimes():
    from mbridge.core.bridge import _MODEL_REGISTRY

    assert set(_MODEL_REGISTRY) - MULTI_MODAL == set(FAMILIES) <= set(families())
    assert not MULTI_MODAL & set(families())


def _load_prediction(world: World, hf: Path, renamed: Path, megatron: Path) -> None:
    bridge, model = _bridge(_plain_config(hf)), megatron_model(config_of(hf), world, torch.bfloat16)
    swapped = ""
    if config_of(hf)["model_type"] == "deepseek_v3":
        bridge.config.num_layers = 61
    if config_of(hf)["model_type"] == "mimo":
        swapped = "mtp.layers.0.eh_proj.weight"
    _compare(bridge, model, renamed, megatron, swapped=swapped)


@pytest.mark.skipif(
    metadata.version("megatron-core") >= "0.17",
    reason="mbridge 0.15 has 0.16's names of prediction layers",
)
@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "deepseek_v3"])
def test_mbridge_loads_the_same_prediction_layer(tmp_path, family):
    (hf, megatron), renamed = _unpadded(tmp_path, family), tmp_path / "renamed"
    renamed.mkdir()
    number = "model.layers.61." if family == "deepseek_v3" else "model.layers.3."
    tensors = {name.replace("model.layers.3.", number): tensor for name, tensor in tensors_of(hf).items()}
    save_file(tensors, renamed / "model.safetensors")
    run(World(), _load_prediction, hf, renamed, megatron)

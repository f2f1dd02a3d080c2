"""Tiny random models with a tokenizer, in the HF folder layout, for tests of every layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["What", "Ġis", "The", "Ġanswer", "user", "assistant", "Ġthe", "Ġquick", "Ġ+", "10", "Ġhello", "ing", "Ġsays"]
"""merged from the left, as far as the vocabulary reaches; Ġ is the byte-level alphabet's space"""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""ids 0, 1 and 2 of every tiny tokenizer; 2 ends an answer, 0 pads"""


def tiny_tokenizer(folder: Path, vocab: int = 300) -> Any:
    """A byte-level BPE of at most `vocab` entries with a chat template, saved into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # merges written out: the trainer of `tokenizers` breaks ties by hash order, which differs from run to run
    entries = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in WORDS:
        left = word[0]
        for right in word[1:]:
            if len(entries) < vocab and left + right not in entries:
                merges.append((left, right))
                entries.append(left + right)
            left += right
    core = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges))
    core.add_special_tokens(SPECIALS)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {
    **_MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
_DEEPSEEK = {
    **_SHARED,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": None,
}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "tie_word_embeddings": False,
}
_QWEN_MOE = {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 40}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "llama": ("llama", {"tie_word_embeddings": False, "rope_parameters": _LLAMA3}),
    "mimo": ("qwen2", {"tie_word_embeddings": False, "head_dim": None}),
    "glm4": ("glm4", {"attention_bias": True, "tie_word_embeddings": False}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "num_experts": 4, "norm_topk_prob": True, "tie_word_embeddings": False}),
    "glm4_moe": ("glm4_moe", {**_SHARED, "attention_bias": True, "use_qk_norm": True}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "qwen2_moe": ("qwen2_moe", {**_QWEN_MOE, "head_dim": None, "tie_word_embeddings": False}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "moonlight": ("deepseek_v3", {**_DEEPSEEK, "q_lora_rank": None, "num_nextn_predict_layers": 0}),
    "kimi_k2": ("deepseek_v3", {**_DEEPSEEK, "num_nextn_predict_layers": 0}),
    "glm4_moe_lite": ("glm4_moe_lite", _DEEPSEEK),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {
            **_DEEPSEEK,
            "index_n_heads": 2,
            "index_head_dim": 24,
            "index_topk": 8,
            "indexer_types": ["full", "full", "shared"],
            "index_topk_freq": 2,
            "index_skip_topk_offset": 2,
        },
    ),
    "qwen3_next": ("qwen3_next", {**_DELTA, **_QWEN_MOE}),
    "qwen3_5": ("qwen3_5", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe", {**_DELTA, **_QWEN_MOE}),
}
"""tiny family -> the model_type whose transformers class makes it, and config fields beyond the common ones"""
OWN_CODE = ("mimo", "kimi_k2")
"""families whose classes are code in the repository; those of another family have the same weights"""


def tiny_config(family: str = "qwen3", vocab: int = 300, **changes: Any) -> Any:
    """A transformers config: hidden 64, 3 layers, 4 query and 2 key-value heads of 16, 4 experts."""
    from transformers import AutoConfig

    kind, own = FAMILIES[family]
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
        **own,
        **changes,
    }
    if values["head_dim"] is None:
        values.pop("head_dim")
    if kind in ("qwen3_5", "qwen3_5_moe"):
        tied = values["tie_word_embeddings"]
        return AutoConfig.for_model(kind, text_config=values, vision_config=_VISION, tie_word_embeddings=tied)
    return AutoConfig.for_model(kind, **values)


def tiny_model(
    folder: Path, family: str = "qwen3", seed: int = 0, vocab: int = 300, dtype: str = "float32", **changes: Any
) -> Path:
    """Write config.json, model.safetensors, tokenizer and generation_config.json; returns `folder`.

    Args:
        family: of FAMILIES; qwen3 (QK-norm, tied), qwen2 (qkv bias, tied), llama (llama3 rope scaling, untied)...
        seed: of the weights. Biases and norm weights are random too, so that a mix-up of them shows.
        changes: fields of the config to override.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer(folder, vocab)
    config = tiny_config(family, vocab, **changes)
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    model = auto.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.15 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if family in OWN_CODE:
        edit_json(folder / "config.json", model_type=family, num_nextn_predict_layers=0)
    return folder


def as_on_the_hub(folder: Path, family: str) -> Path:
    """Add to a tiny model what repositories have and transformers leaves out: MTP layers, stacked experts, float32."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    if family == "qwen3_5_moe":
        _stack_experts(weights)
    _add_prediction_layer(weights, family, folder)
    float32 = (*_FLOAT32, "block_sparse_moe.gate.weight") if family == "minimax_m2" else _FLOAT32
    for name in weights:
        if name.endswith(float32):
            weights[name] = weights[name].to(torch.float32) + 1e-4 * torch.arange(weights[name].shape[-1])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


_FLOAT32 = ("e_score_correction_bias", "A_log", "dt_bias")
_PREDICTION = {
    **dict.fromkeys(
        ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"),
        ("model.layers.3.", "model.layers.3.", ("enorm", "hnorm", "shared_head.norm", "eh_proj")),
    ),
    "mimo": (
        "model.mtp_layers.0.",
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"),
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        ("mtp.layers.0.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")),
    ),
}
"""family -> prefix of the MTP layer, prefix of what surrounds it, names of three norms and the projection"""


def _add_prediction_layer(weights: dict[str, Any], family: str, folder: Path) -> None:
    """One MTP layer of the form of the last decoder layer, with other values."""
    import torch

    if family not in _PREDICTION:
        return
    layer, head, (*norms, projection) = _PREDICTION[family]
    root = "model.language_model." if family.startswith("qwen3_5") else "model."
    last = f"{root}layers.{3 if family.startswith('qwen') else 2}."
    for name, tensor in list(weights.items()):
        if name.startswith(last):
            weights[layer + name.removeprefix(last)] = tensor * 0.5
    like = weights[f"{root}norm.weight"]
    for i, norm in enumerate(norms):
        weights[f"{head}{norm}.weight"] = like + (i + 1) / 8
    table = torch.arange(like.numel() * 2 * like.numel(), dtype=torch.float32).reshape(like.numel(), -1)
    weights[f"{head}{projection}.weight"] = torch.sin(table).to(like.dtype)
    if head == "model.layers.3.":
        weights[f"{head}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{head}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    field = "mtp_num_hidden_layers" if family.startswith("qwen3_5") else "num_nextn_predict_layers"
    if family.startswith("qwen3_5"):
        edit_json(folder / "config.json", "text_config", **{field: 1})
        _split_experts(weights, layer)
    else:
        edit_json(folder / "config.json", **{field: 1})


def _stack_experts(weights: dict[str, Any]) -> None:
    import torch

    for prefix in sorted({n.split("experts.")[0] + "experts." for n in weights if ".mlp.experts." in n}):
        parts = [[weights.pop(f"{prefix}{e}.{x}_proj.weight") for x in ("gate", "up", "down")] for e in range(4)]
        weights[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(p[:2]) for p in parts])
        weights[f"{prefix}down_proj"] = torch.stack([p[2] for p in parts])


def _split_experts(weights: dict[str, Any], layer: str) -> None:
    """The hub stacks the experts of decoder layers, not those of MTP layers."""
    prefix = f"{layer}mlp.experts."
    if f"{prefix}down_proj" not in weights:
        return
    pairs = zip(weights.pop(f"{prefix}gate_up_proj"), weights.pop(f"{prefix}down_proj"), strict=True)
    for e, (both, down) in enumerate(pairs):
        gate, up = both.chunk(2)
        for kind, tensor in (("gate", gate), ("up", up), ("down", down)):
            weights[f"{prefix}{e}.{kind}_proj.weight"] = tensor.clone()


def spec_at(folder: Path) -> Any:
    """What the folder's config.json says."""
    from slimecli.model_specs import from_config

    return from_config(json.loads((folder / "config.json").read_text()))


def edit_json(path: Path, *inside: str, **changes: Any) -> None:
    """Set fields of a JSON file, in the object reached by the keys `inside`."""
    data = json.loads(path.read_text())
    target = data
    for key in inside:
        target = target[key]
    target.update(changes)
    path.write_text(json.dumps(data))

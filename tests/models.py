"""Tiny random models with a tokenizer, in the HF folder layout, for tests of every layer."""

from __future__ import annotations

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


def tiny_config(family: str = "qwen3", vocab: int = 300, **changes: Any) -> Any:
    """A transformers config: hidden 64, 3 layers, 4 query and 2 key-value heads of 16."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    common: dict[str, Any] = {
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
    }
    if family == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return LlamaConfig(**{**common, "rope_parameters": rope, "tie_word_embeddings": False, **changes})
    if family == "qwen2":
        common.pop("head_dim")
        return Qwen2Config(**{**common, **changes})
    if family == "qwen3":
        return Qwen3Config(**{**common, **changes})
    raise ValueError(f"unknown family {family!r}")


def tiny_model(
    folder: Path, family: str = "qwen3", seed: int = 0, vocab: int = 300, dtype: str = "float32", **changes: Any
) -> Path:
    """Write config.json, model.safetensors, tokenizer and generation_config.json; returns `folder`.

    Args:
        family: qwen3 (QK-norm, tied), qwen2 (qkv bias, tied) or llama (llama3 rope scaling, untied).
        seed: of the weights. Biases and norm weights are random too, so that a mix-up of them shows.
        changes: fields of the config to override.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer(folder, vocab)
    model = AutoModelForCausalLM.from_config(tiny_config(family, vocab, **changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.15 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder

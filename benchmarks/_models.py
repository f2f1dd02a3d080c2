"""Model folders with random weights in the shapes that are measured, and what such a shape costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen3-architecture model and the work to measure it with."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    prompts: int
    """distinct prompts of the decode benchmark"""
    group: int
    """answers per prompt"""
    prompt_tokens: int
    new_tokens: int

    @property
    def matmul_shapes(self) -> list[tuple[int, int]]:
        """(out, in) of every weight matrix that a token passes through, fused as an engine would, LM head last."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = [(q + 2 * kv, self.hidden), (self.hidden, q), (2 * self.ffn, self.hidden), (self.hidden, self.ffn)]
        return layer * self.layers + [(self.vocab, self.hidden)]

    @property
    def matmul_params(self) -> int:
        """Weights that a token is multiplied with."""
        return sum(rows * columns for rows, columns in self.matmul_shapes)

    @property
    def kv_values(self) -> int:
        """Numbers in the KV cache per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def flops(self, tokens: int, context: float, *, backward: bool = False) -> float:
        """Floating-point operations of `tokens` tokens with a mean attention span of `context`."""
        attention = 4 * self.layers * self.heads * self.head_dim * context
        return (3 if backward else 1) * tokens * (2 * self.matmul_params + attention)


_SMALL = {"prompts": 32, "group": 8, "prompt_tokens": 14, "new_tokens": 24}
_GPU = {"prompts": 64, "group": 4, "prompt_tokens": 128, "new_tokens": 256}
_Q06 = {"hidden": 1024, "layers": 28, "ffn": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab": 151936}
_Q17 = {"hidden": 2048, "layers": 28, "ffn": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab": 151936}
_Q4 = {"hidden": 2560, "layers": 36, "ffn": 9728, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 151936}

SHAPES: dict[str, Shape] = {
    "quickstart": Shape(hidden=64, layers=3, ffn=192, heads=4, kv_heads=2, head_dim=16, vocab=300, **_SMALL),
    "tiny": Shape(
        hidden=256, layers=4, ffn=768, heads=4, kv_heads=2, head_dim=64, vocab=4096,
        prompts=64, group=1, prompt_tokens=32, new_tokens=64,
    ),
    "0.6b": Shape(**_Q06, prompts=32, group=1, prompt_tokens=16, new_tokens=16),
    "1.7b": Shape(**_Q17, prompts=32, group=1, prompt_tokens=16, new_tokens=16),
    "0.6b-gpu": Shape(**_Q06, **_GPU),
    "4b-gpu": Shape(**_Q4, **_GPU),
}  # fmt: skip
"""name -> shape; the last two are for an accelerator, in bfloat16"""


def make_model(folder: Path, shape: Shape, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write an HF folder: config, random weights, a byte-level tokenizer. Kept and reused if it is there already."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    done = folder / "made.json"
    recipe = json.dumps([repr(shape), seed, dtype])
    if done.is_file() and done.read_text() == recipe:
        return folder
    tokenizer = make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    done.write_text(recipe)
    return folder


def make_tokenizer(folder: Path) -> Any:
    """A byte-level tokenizer without merges: enough for an engine to load and to turn ids into text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def random_prompts(shape: Shape, seed: int = 0) -> list[list[int]]:
    """[prompts][prompt_tokens] distinct prompts of ids that the tokenizer knows."""
    import random

    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(shape.prompt_tokens)] for _ in range(shape.prompts)]

"""ModelSpec: the numbers of one model, and everything that follows from them by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
"""bytes per element"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the models of one HF `model_type` have in common."""

    model_type: str
    architecture: str
    """HF class name"""
    layout: str
    """which weight map serves it, see slimecli.weights.maps"""
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys"""
    qkv_bias: bool = False
    """bias on the q, k and v projections"""
    fixed: Mapping[str, Any] = field(hash=False)
    """config.json fields that have one value in the whole family; any other value is a model of another kind"""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of long-context rotary embeddings (`llama3` type)."""

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    """positions the model was trained on before scaling (tokens)"""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of one decoder-only model."""

    name: str
    """registry name, or the folder's for a spec built from a config"""
    family: Family
    layers: int
    hidden: int
    ffn: int
    """rows of gate_proj and up_proj"""
    heads: int
    """query heads"""
    kv_heads: int
    """key and value heads; heads / kv_heads queries share one"""
    head_dim: int
    vocab: int
    """rows of the embedding as stored; the tokenizer may use fewer"""
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    eps: float
    """added to the mean square in RMSNorm"""
    tied: bool
    """the output layer is the embedding"""
    max_positions: int
    """context the model states (tokens)"""
    repo: str = ""
    """hub repository that has these numbers"""
    revision: str = "main"
    """hub revision to download unless another is asked for"""
    source: str = ""
    """where the numbers were read"""
    note: str = ""
    """what is easily got wrong about this model"""

    # -- derived numbers ---------------------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def params_per_layer(self) -> int:
        """Parameters of one decoder layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv)
        bias = q + 2 * kv if self.family.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.family.qk_norm else 0)
        return attention + bias + norms + 3 * self.hidden * self.ffn

    @property
    def params(self) -> int:
        """All parameters; a tied output layer counts once."""
        return self.layers * self.params_per_layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """Parameters that one token passes through."""
        return self.params

    @property
    def matmul_params(self) -> int:
        """Parameters that take part in a matrix product for every token, output layer included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        per_layer = self.hidden * (2 * q + 2 * kv) + 3 * self.hidden * self.ffn
        return self.layers * per_layer + self.vocab * self.hidden

    def weight_bytes(self, dtype: str = "bfloat16") -> int:
        """Bytes of all weights."""
        return self.params * BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        """Bytes that one token of context takes in the KV cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]

    def flops_per_token(self, context: int, *, backward: bool = False) -> int:
        """Floating-point operations for one token that attends to `context` tokens; with backward three times that."""
        attention = 4 * self.layers * self.heads * self.head_dim * context
        return (2 * self.matmul_params + attention) * (3 if backward else 1)

    def padded_vocab(self, multiple: int = 128) -> int:
        """Vocabulary rounded up as Megatron does."""
        return -(-self.vocab // multiple) * multiple

    # -- other forms -------------------------------------------------------------------------------------------------

    def to_config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """config.json as transformers and SGLang read it."""
        scaling = self.rope_scaling
        config: dict[str, Any] = {
            **self.family.fixed,
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_positions,
            "torch_dtype": dtype,
            "use_cache": True,
            "rope_scaling": None,
        }
        if scaling is not None:
            config["rope_scaling"] = {
                "rope_type": scaling.rope_type,
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        return config

    def check(self, config: Mapping[str, Any]) -> list[str]:
        """Every field in which an HF config differs from this spec, as `field: spec 8, config 4`.

        The context length is left out: the same weights are published with several.
        """
        from slimecli.errors import SlimeError
        from slimecli.model_specs.registry import from_config

        try:
            other = from_config(config)
        except SlimeError as error:
            return [error.what]
        skipped = {"name", "max_positions", "repo", "revision", "source", "note", "family"}
        pairs: list[tuple[str, Any, Any]] = [
            ("model_type", self.family.model_type, other.family.model_type),
            ("qk_norm", self.family.qk_norm, other.family.qk_norm),
            ("qkv_bias", self.family.qkv_bias, other.family.qkv_bias),
        ]
        pairs += [
            (f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name not in skipped
        ]
        return [f"{name}: spec {_show(mine)}, config {_show(theirs)}" for name, mine, theirs in pairs if mine != theirs]

    def megatron_args(self) -> dict[str, Any]:
        """Megatron-LM arguments by flag name without dashes; True marks a flag without a value."""
        args: dict[str, Any] = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "ffn-hidden-size": self.ffn,
            "num-attention-heads": self.heads,
            "group-query-attention": True,
            "num-query-groups": self.kv_heads,
            "kv-channels": self.head_dim,
            "vocab-size": self.vocab,
            "max-position-embeddings": self.max_positions,
            "position-embedding-type": "rope",
            "use-rotary-position-embeddings": True,
            "rotary-base": int(self.rope_theta),
            "rotary-percent": 1.0,
            "normalization": "RMSNorm",
            "norm-epsilon": self.eps,
            "swiglu": True,
            "disable-bias-linear": True,
        }
        if self.family.qkv_bias:
            args["add-qkv-bias"] = True
        if self.family.qk_norm:
            args["qk-layernorm"] = True
        if not self.tied:
            args["untie-embeddings-and-output-weights"] = True
        if self.rope_scaling is not None:
            args |= {"use-rope-scaling": True, "rope-scaling-factor": self.rope_scaling.factor}
        return args

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the numbers and what follows from them."""
        plain = {**asdict(self), "family": self.family.model_type}
        return {
            **plain,
            "params": self.params,
            "active_params": self.active_params,
            "bytes": {dtype: self.weight_bytes(dtype) for dtype in BYTES},
            "kv_bytes_per_token": self.kv_bytes_per_token(),
            "flops_per_token": self.flops_per_token(0),
            "megatron_args": self.megatron_args(),
        }


def _show(value: Any) -> str:
    if isinstance(value, RopeScaling):
        return f"{value.rope_type} x{value.factor:g} ({asdict(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)

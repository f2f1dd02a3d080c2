"""ModelSpec: the numbers of one model, and everything that follows from them by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slimecli.model_specs import counts
from slimecli.model_specs.counts import BYTES


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the models of one HF `model_type` have in common."""

    model_type: str
    architecture: str
    """HF class name"""
    layout: str
    """which weight map serves it, see slimecli.weights.maps"""
    nested: str = ""
    """key of config.json under which the language model's numbers lie (`text_config`); empty: at the top"""
    traits: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """ModelSpec fields that no config field of this family states, and their one value; a table (`moe`, `mla`,
    `indexer`, `linear`), even an empty one, says that the family's models have that part"""
    keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    """ModelSpec field -> config.json field, where the family uses another name than most, or states what most leave to
    the traits (see config.py); with a key as well, a trait is what holds where the config is silent"""
    fixed: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """config.json fields that have one value in the whole family; any other value is a model of another kind"""
    absent: Sequence[str] = field(default=(), hash=False)
    """config.json fields that no model of the family has, or only as null; any value is a model of another kind"""


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Mixture of experts in place of the dense MLP."""

    experts: int
    """routed experts per layer"""
    top_k: int
    """routed experts that a token passes through"""
    ffn: int
    """rows of gate_proj and up_proj of one routed expert"""
    shared_ffn: int = 0
    """rows of gate_proj and up_proj of all shared experts together; 0: none"""
    shared_gate: bool = False
    """the shared expert's output is scaled by sigmoid of a projection of its input"""
    dense_layers: int = 0
    """leading layers with a dense MLP of ModelSpec.ffn rows instead"""
    score: str = "softmax"
    """router function: `softmax` or `sigmoid`"""
    normalize: bool = True
    """weights of the chosen experts are divided by their sum"""
    scale: float = 1.0
    """factor on the weights of the chosen routed experts"""
    groups: int = 1
    """groups the experts are divided into for group-limited routing"""
    top_groups: int = 1
    """groups that a token may choose experts from"""
    bias: bool = False
    """a correction bias per expert (float32) takes part in the choice, not in the weights"""


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int
    """rank of the query compression; 0: queries are projected directly"""
    kv_rank: int
    """rank of the joint key-value compression, which is what the cache holds"""
    nope_dim: int
    """dimensions per head of query and key without rotary embedding"""
    rope_dim: int
    """dimensions per head of query and (shared) key with rotary embedding"""
    v_dim: int
    """dimensions per head of the values"""

    @property
    def qk_dim(self) -> int:
        """Dimensions per head of queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Lightning indexer of DeepSeek sparse attention: it chooses the keys that a query attends to."""

    heads: int
    head_dim: int
    top_k: int
    """keys chosen per query"""
    every: int = 1
    """beyond the first `offset` layers, one in so many computes indices; the others reuse those of the last that did"""
    offset: int = 1

    def computes(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has indexer weights."""
        return max(layer - self.offset + 1, 0) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated DeltaNet layers (arXiv 2412.06464) between full-attention layers."""

    key_heads: int
    value_heads: int
    key_dim: int
    """dimensions per key head"""
    value_dim: int
    """dimensions per value head"""
    conv: int
    """kernel size of the causal convolution (tokens)"""
    full_every: int = 4
    """layer i (from 0) is full attention if i + 1 is a multiple of this, gated delta otherwise"""

    def is_full(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) is full attention."""
        return (layer + 1) % self.full_every == 0


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of long-context rotary embeddings."""

    rope_type: str
    """`llama3` or `yarn`"""
    factor: float
    original_max_positions: int = 8192
    """positions the model was trained on before scaling (tokens)"""
    low_freq_factor: float = 1.0
    """llama3 only"""
    high_freq_factor: float = 4.0
    """llama3 only"""
    beta_fast: float = 32.0
    """yarn only: rotations above which a dimension is not interpolated"""
    beta_slow: float = 1.0
    """yarn only: rotations below which a dimension is interpolated fully"""
    mscale: float = 0.0
    """yarn only: attention temperature; 0: yarn's own 0.1 ln(factor) + 1"""
    mscale_all_dim: float = 0.0
    """yarn only: as mscale, for the softmax scale of latent attention"""


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
    """dimensions per head; with latent attention that of the rotary part, as HF has it"""
    vocab: int
    """rows of the embedding as stored; the tokenizer may use fewer"""
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rotary: float = 1.0
    """part of head_dim that is rotated"""
    interleaved: bool = False
    """rotary pairs are neighbours (0, 1), (2, 3)... instead of halves"""
    qkv_bias: bool = False
    """bias on the q, k and v projections"""
    qk_norm: str = ""
    """RMSNorm on queries and keys: `head` per head, `full` over all heads together, empty: none"""
    gated: bool = False
    """attention output is multiplied by a sigmoid gate that q_proj also computes"""
    sandwich: bool = False
    """also a norm after attention and after the MLP, before each is added to the residual"""
    unit_norms: bool = False
    """RMSNorm weights are stored less one"""
    moe: Moe | None = None
    mla: Mla | None = None
    indexer: Indexer | None = None
    linear: GatedDelta | None = None
    mtp: int = 0
    """multi-token-prediction layers stored after the decoder"""
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
    def dense_layers(self) -> int:
        """Layers with a dense MLP of `ffn` rows."""
        return self.layers if self.moe is None else self.moe.dense_layers

    @property
    def params(self) -> int:
        """All parameters but those of prediction layers; a tied output layer counts once."""
        return counts.params(self)

    @property
    def active_params(self) -> int:
        """Parameters that one token passes through, embedding and output layer included."""
        return counts.params(self, active=True)

    @property
    def mtp_params(self) -> int:
        """Parameters of the multi-token-prediction layers, which `params` does not include."""
        return counts.mtp_params(self)

    @property
    def matmul_params(self) -> int:
        """Parameters that take part in a matrix product for every token, output layer included."""
        return counts.matmul_params(self)

    @property
    def activation_width(self) -> int:
        """Numbers that one token leaves behind in one layer until its backward pass, as a rough estimate."""
        return counts.activation_width(self)

    def weight_bytes(self, dtype: str = "bfloat16") -> int:
        """Bytes of all weights, without prediction layers."""
        return self.params * BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        """Bytes that one token of context takes in the KV cache, over all layers."""
        return counts.cache_bytes(self, dtype)

    def state_bytes(self, dtype: str = "bfloat16") -> int:
        """Bytes that one sequence takes whatever its length (gated-delta layers); 0 for models of attention only."""
        return counts.state_bytes(self, dtype)

    def flops_per_token(self, context: int, *, backward: bool = False) -> int:
        """Floating-point operations for one token that attends to `context` tokens; with backward three times that."""
        return (2 * self.matmul_params + counts.attention_flops(self, context)) * (3 if backward else 1)

    def padded_vocab(self, multiple: int = 128) -> int:
        """Vocabulary rounded up as Megatron does."""
        return -(-self.vocab // multiple) * multiple

    # -- other forms -------------------------------------------------------------------------------------------------

    def to_config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """config.json as transformers and SGLang read it."""
        from slimecli.model_specs import config

        return config.to_config(self, dtype)

    def check(self, config: Mapping[str, Any]) -> list[str]:
        """Every field in which an HF config differs from this spec, as `field: spec 8, config 4`.

        The context length is left out: the same weights are published with several.
        """
        from slimecli.model_specs.config import differences
        from slimecli.model_specs.registry import families

        return differences(self, config, families())

    def megatron_args(self) -> dict[str, Any]:
        """Megatron-LM arguments by flag name without dashes; True marks a flag without a value."""
        from slimecli.model_specs.megatron import arguments

        return arguments(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the numbers and what follows from them."""
        plain = {**asdict(self), "family": self.family.model_type}
        return {
            **plain,
            "params": self.params,
            "active_params": self.active_params,
            "mtp_params": self.mtp_params,
            "bytes": {dtype: self.weight_bytes(dtype) for dtype in BYTES},
            "kv_bytes_per_token": self.kv_bytes_per_token(),
            "state_bytes": self.state_bytes(),
            "flops_per_token": self.flops_per_token(0),
            "megatron_args": self.megatron_args(),
        }

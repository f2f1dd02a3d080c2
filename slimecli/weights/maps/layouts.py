"""The layouts: how families call their tensors. What a model has (MoE, MLA, gates...) its spec tells, not this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slimecli.model_specs import ModelSpec
from slimecli.weights.maps.rule import Shape


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """HF names of prediction layers; {k} is the layer's number among them, {n} that after the decoder's."""

    layer: str
    """prefix of the transformer layer"""
    head: str
    """prefix of the four tensors around it"""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    swapped: bool = False
    """the projection's column halves change places in Megatron, which has the embedding's first"""
    copies: tuple[str, ...] = ()
    """tensors of the main model that some repositories store again under `head`"""


@dataclass(frozen=True, kw_only=True)
class Names:
    """HF names of one layout, where they are not the same in all."""

    root: str = "model."
    """prefix of the decoder"""
    other_root: str = ""
    """prefix that transformers keeps when it takes the language model out of a larger one"""
    mlp: str = "mlp."
    """prefix of routed experts and router; in transformers' own modules it is `mlp.` in every family"""
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """of routed experts"""
    router_bias: str = "gate.e_score_correction_bias"
    float32_router: bool = False
    """the router's weight is float32 in a bfloat16 model"""
    shared: str = "shared_experts."
    fused_gate_up: bool = False
    """dense layers have one gate_up_proj"""
    fused_delta: bool = False
    """gated-delta layers have one projection each for q, k, v, z and for b, a"""
    stacked_experts: bool = False
    """a layer's routed experts are one tensor on the hub; transformers also writes them one by one"""
    carried: tuple[str, ...] = ()
    """prefixes of tensors outside the language model, which go through under their own names"""
    mtp: MtpNames | None = None


_APPENDED = MtpNames(
    layer="model.layers.{n}.", head="model.layers.{n}.", copies=("embed_tokens.weight", "shared_head.head.weight")
)
_MIMO = MtpNames(
    layer="model.mtp_layers.{k}.",
    head="model.mtp_layers.{k}.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    norm="final_layernorm",
    swapped=True,
)
_QWEN = MtpNames(
    layer="mtp.layers.{k}.",
    head="mtp.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
)

_QWEN3_5 = Names(shared="shared_expert.", stacked_experts=True, mtp=_QWEN)

LAYOUTS: dict[str, Names] = {
    "dense": Names(),
    "mimo": Names(mtp=_MIMO),
    "glm4": Names(fused_gate_up=True),
    "moe": Names(mtp=_APPENDED),
    "minimax": Names(
        mlp="block_sparse_moe.",
        gate_up_down=("w1", "w3", "w2"),
        router_bias="e_score_correction_bias",
        float32_router=True,
        mtp=_APPENDED,
    ),
    "mixtral": Names(mlp="block_sparse_moe.", gate_up_down=("w1", "w3", "w2")),
    "mla": Names(mtp=_APPENDED),
    "qwen2_moe": Names(shared="shared_expert."),
    # vLLM feeds this projection the embedding first, as Megatron does; slime's checkpoints have it swapped all the same
    "qwen3_next": Names(shared="shared_expert.", fused_delta=True, mtp=replace(_QWEN, swapped=True)),
    "qwen3_5": replace(_QWEN3_5, root="model.language_model.", carried=("model.visual.",)),
    "qwen3_5_text": replace(_QWEN3_5, other_root="model.language_model."),
}
"""Family.layout -> its names"""


@dataclass(frozen=True)
class Place:
    """One layer on both sides."""

    spec: ModelSpec
    names: Names
    hf: str
    """prefix of its HF names"""
    core: str
    """prefix of its Megatron names"""
    index: int
    """number of the layer, prediction layers counted on after the decoder's"""
    stored: Mapping[str, Shape] | None
    """as for rules_of"""

    @property
    def predicts(self) -> bool:
        """Whether it is a prediction layer."""
        return self.index >= self.spec.layers

    @property
    def is_moe(self) -> bool:
        """Whether its MLP is a mixture of experts."""
        return self.spec.moe is not None and self.index >= self.spec.moe.dense_layers

    @property
    def is_linear(self) -> bool:
        """Whether it is a gated-delta layer; prediction layers have full attention."""
        delta = self.spec.linear
        return delta is not None and not self.predicts and not delta.is_full(self.index)

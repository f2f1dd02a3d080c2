"""What a rank of megatron-core must hold, cut out of the HF tensors by hand.

Written from megatron-core's modules and transformers' models (which row of which matrix is multiplied with what), so
that it shares no code and no table with slime's weight maps.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core import parallel_state

from tests.megatron.models import experts_of

Tensors = dict[str, torch.Tensor]

WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
"""held whole by every tensor-parallel rank"""
HEADS = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}
"""rows are heads, which the ranks share"""
COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
}
"""columns are heads or intermediate features, which the ranks share"""
GATED = {"mlp.linear_fc1.weight": "mlp.", "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts."}
"""this rank's rows of gate_proj above its rows of up_proj"""


def in_common_words(tensors: Tensors) -> Tensors:
    """Mixtral's and Qwen2-MoE's names as most families have them. Mixtral computes w2(silu(w1 x) * w3 x)."""
    words = {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
        ".shared_expert.": ".shared_experts.",
    }
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, common in words.items():
            name = name.replace(theirs, common)
        renamed[name] = tensor
    return renamed


def share(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """The `rank`-th of `size` equal parts."""
    rows = tensor.shape[dim] // size
    assert rows * size == tensor.shape[dim]
    return tensor.narrow(dim, rank * rows, rows)


class Expected:
    """The tensors of one rank, by megatron-core's name in `state_dict`."""

    def __init__(self, tensors: Tensors, config: dict[str, Any], padded_vocab: int) -> None:
        other_words = config["model_type"] in ("mixtral", "qwen2_moe")
        self.hf, self.config, self.padded = in_common_words(tensors) if other_words else tensors, config, padded_vocab
        self.tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        self.etp = (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        self.ep = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size()

    def of(self, model: Any) -> dict[str, torch.Tensor]:
        """Every weight of this rank's model."""
        names = [n for n, t in model.state_dict().items() if isinstance(t, torch.Tensor) and "_extra_state" not in n]
        first = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
        return {name: self.tensor(name, first) for name in names}

    def tensor(self, name: str, first_layer: int) -> torch.Tensor:
        """One weight; `first_layer` is the global number of this rank's layer 0."""
        outer = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "model.embed_tokens.weight"
            if self.config["tie_word_embeddings"]
            else "lm_head.weight",
        }
        if name in outer:
            table = self.hf[outer[name]]
            rows = torch.zeros(self.padded, table.shape[1], dtype=table.dtype)
            rows[: len(table)] = table
            return share(rows, 0, *self.tp)
        if name == "decoder.final_layernorm.weight":
            return self.hf["model.norm.weight"]
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
            return self._layer(f"model.layers.{int(match[1]) + first_layer}.", match[2])
        match = re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name)
        assert match, name
        # the layer inside is mtp_model_layer in memory since megatron-core 0.17; checkpoints keep the older name
        return self._prediction(int(match[1]), match[2].replace("mtp_model_layer.", "transformer_layer."))

    def _prediction(self, number: int, name: str) -> torch.Tensor:
        mimo = self.config["model_type"] == "mimo"
        at = f"model.mtp_layers.{number}." if mimo else f"model.layers.{self.config['num_hidden_layers'] + number}."
        if name.startswith("transformer_layer."):
            return self._layer(at, name.removeprefix("transformer_layer."))
        if name == "eh_proj.weight":
            table = self.hf[f"{at}{'input_proj' if mimo else 'eh_proj'}.weight"]
            if mimo:
                # MiMo multiplies [hidden state | embedding], megatron-core [embedding | hidden state]
                half = table.shape[1] // 2
                table = torch.cat([table[:, half:], table[:, :half]], dim=1)
            return share(table, 0, *self.tp)
        ours = {"enorm.weight": "enorm", "hnorm.weight": "hnorm", "final_layernorm.weight": "shared_head.norm"}
        if mimo:
            ours = {
                "enorm.weight": "token_layernorm",
                "hnorm.weight": "hidden_layernorm",
                "final_layernorm.weight": "final_layernorm",
            }
        return self.hf[f"{at}{ours[name]}.weight"]

    def _layer(self, at: str, name: str) -> torch.Tensor:
        if name in WHOLE:
            return self.hf[at + WHOLE[name]]
        if name in HEADS:
            return share(self.hf[at + HEADS[name]], 0, *self.tp)
        if name in COLUMNS:
            return share(self.hf[at + COLUMNS[name]], 1, *self.tp)
        if name in GATED:
            return torch.cat([share(self.hf[f"{at}{GATED[name]}{x}_proj.weight"], 0, *self.tp) for x in ("gate", "up")])
        if name.startswith("self_attention.linear_qkv."):
            return self._qkv(at, name.rpartition(".")[2])
        return self._expert(at, name)

    def _qkv(self, at: str, kind: str) -> torch.Tensor:
        """For each KV head of this rank: the query heads that share it, then the key head, then the value head."""
        kv, heads = self.config["num_key_value_heads"], self.config["num_attention_heads"]
        q, k, v = (self.hf[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv")
        size, group = k.shape[0] // kv, heads // kv
        rows = []
        for head in range(kv)[self.tp[0] * kv // self.tp[1] : (self.tp[0] + 1) * kv // self.tp[1]]:
            rows += [q[(head * group + i) * size : (head * group + i + 1) * size] for i in range(group)]
            rows += [k[head * size : (head + 1) * size], v[head * size : (head + 1) * size]]
        return torch.cat(rows)

    def _expert(self, at: str, name: str) -> torch.Tensor:
        match = re.fullmatch(r"mlp\.experts\.linear_fc(\d)\.weight(\d+)", name)
        match = match or re.fullmatch(r"mlp\.experts\.local_experts\.(?P<e>\d+)\.linear_fc(?P<fc>\d)\.weight", name)
        assert match, name
        layer, local = (match["fc"], match["e"]) if "fc" in match.groupdict() else (match[1], match[2])
        number = self.ep[0] * (experts_of(self.config) // self.ep[1]) + int(local)
        own = f"{at}mlp.experts.{number}."
        if layer == "2":
            return share(self.hf[f"{own}down_proj.weight"], 1, *self.etp)
        return torch.cat([share(self.hf[f"{own}{x}_proj.weight"], 0, *self.etp) for x in ("gate", "up")])

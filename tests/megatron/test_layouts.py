"""Families that stock megatron-core has no model for: its loader reads their checkpoints too, sharded as they would be.

GLM-4's norms after each branch, MiniMax's QK norms over all heads, gated delta layers and the indexer of sparse
attention are modules of slime's plugins. So the sharded tensors of a rank are made here, by hand, under the names and
with the splits of these modules (reference: slime_plugins/models), and the expected values are cut out of the HF
tensors by hand as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor

from slimecli.weights.convert import torch_dist_to_hf
from tests.megatron.expected import HEADS, WHOLE, Expected
from tests.megatron.harness import World, run
from tests.megatron.models import PADDED, config_of, experts_of, tensors_of

TP2, PP2, EP2 = World(tp=2), World(pp=2), World(ep=2, ranks=2)
MLA = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
DELTA_HALVES = ("in_proj_qkvz", "in_proj_ba")
DELTA_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
SWAPPED = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
FULL_EVERY = 4
"""one layer in so many has full attention in the gated-delta models"""
Shard = tuple[ShardedTensor, torch.Tensor]
"""what is asked of the loader, and what it must give"""


class PluginExpected(Expected):
    """This rank's shards of a family's model, layer by layer."""

    def __init__(self, hf: Path) -> None:
        config = config_of(hf)
        super().__init__(tensors_of(hf), {**config, **config.get("text_config", {})}, PADDED)
        self.family: str = config["model_type"]
        self.root = "model.language_model." if "text_config" in config else "model."
        self.edp = parallel_state.get_expert_data_parallel_rank()
        self.dp = parallel_state.get_data_parallel_rank()

    # -- sharded tensors ----------------------------------------------------------------------------------------------

    def whole(self, key: str, tensor: torch.Tensor) -> Shard:
        """The same on every tensor-parallel rank."""
        replica = (0, self.tp[0], self.dp)
        return ShardedTensor.from_rank_offsets(key, torch.full_like(tensor, torch.nan), replica_id=replica), tensor

    def split(self, key: str, local: torch.Tensor, axis: int) -> Shard:
        """This rank's part of what the ranks share along `axis`."""
        blank, place = torch.full_like(local, torch.nan), (axis, *self.tp)
        return ShardedTensor.from_rank_offsets(key, blank, place, replica_id=(0, 0, self.dp)), local

    def gated(self, key: str, local: torch.Tensor) -> Iterator[Shard]:
        """This rank's gate rows and up rows, which lie half a tensor apart."""
        rank, size = self.tp
        for half, part in enumerate(local.chunk(2)):
            place = (0, half * size + rank, 2 * size)
            blank = torch.full_like(part, torch.nan)
            yield ShardedTensor.from_rank_offsets(key, blank, place, replica_id=(0, 0, self.dp)), part

    def expert(self, key: str, number: int, parts: list[torch.Tensor]) -> Iterator[Shard]:
        """One routed expert's matrix, in `parts` along its rows."""
        for i, part in enumerate(parts):
            shard = ShardedTensor.from_rank_offsets(
                key,
                torch.full_like(part, torch.nan),
                (0, number, experts_of(self.config)),
                (1, i, len(parts)),
                replica_id=(0, 0, self.edp),
                prepend_axis_num=1,
            )
            yield shard, part

    # -- the model ----------------------------------------------------------------------------------------------------

    def shards(self, layers: range) -> Iterator[Shard]:
        """All of this pipeline stage, whose decoder layers are `layers`."""
        at = self.root
        if parallel_state.is_pipeline_first_stage():
            yield self.rows("embedding.word_embeddings.weight", self.hf[f"{at}embed_tokens.weight"])
        for i in layers:
            yield from self.layer(f"decoder.layers.{i}.", f"{at}layers.{i}.", i)
        if parallel_state.is_pipeline_last_stage():
            yield self.whole("decoder.final_layernorm.weight", self.hf[f"{at}norm.weight"])
            yield self.rows("output_layer.weight", self.hf["lm_head.weight"])
            yield from self.prediction_layer()

    def rows(self, key: str, table: torch.Tensor) -> Shard:
        """Embedding or output layer."""
        rows = PADDED // self.tp[1]
        padded = torch.cat([table, table.new_zeros(PADDED - len(table), table.shape[1])])
        return self.split(key, padded[self.tp[0] * rows : (self.tp[0] + 1) * rows], 0)

    def prediction_layer(self) -> Iterator[Shard]:
        """The MTP layer, where the family has one."""
        at, count = "mtp.layers.0.", self.config["num_hidden_layers"]
        if self.family == "glm_moe_dsa":
            own, inner = f"{self.root}layers.{count}.", f"{self.root}layers.{count}."
            names = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm", "eh_proj": "eh_proj"}
        elif self.family.startswith("qwen3"):
            own, inner = "mtp.", "mtp.layers.0."
            names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "final_layernorm": "norm"}
            names["eh_proj"] = "fc"
        else:
            return
        table = self.hf[f"{own}{names.pop('eh_proj')}.weight"]
        if self.family == "qwen3_next":
            left, right = table.chunk(2, dim=1)
            table = torch.cat([right, left], dim=1)
        rows = len(table) // self.tp[1]
        yield self.split(f"{at}eh_proj.weight", table[self.tp[0] * rows : (self.tp[0] + 1) * rows], 0)
        for core, name in names.items():
            yield self.whole(f"{at}{core}.weight", self.hf[f"{own}{name}.weight"])
        yield from self.layer(f"{at}transformer_layer.", inner, count)

    def layer(self, core: str, hf: str, number: int) -> Iterator[Shard]:
        """One transformer layer; `number` counts prediction layers on after the decoder's."""
        predicts = number == self.config["num_hidden_layers"]
        if self.family == "glm_moe_dsa":
            yield from self.latent_attention(core, hf, indexed=number < 2)
        elif "linear_num_key_heads" in self.config and not predicts and (number + 1) % FULL_EVERY:
            yield from self.gated_delta(core, hf)
        else:
            yield from self.grouped_attention(core, hf)
        if self.family == "glm4":
            for name in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"):
                yield self.whole(core + name, self.hf[hf + name])
        if self.family in ("glm4", "qwen3_5") or (self.family == "glm_moe_dsa" and number == 0):
            yield from self.dense(core, hf)
        else:
            yield from self.experts(core, hf)

    def grouped_attention(self, core: str, hf: str) -> Iterator[Shard]:
        """Fused q, k, v by KV head, and the norms."""
        yield self.whole(f"{core}self_attention.linear_qkv.layer_norm_weight", self.hf[f"{hf}input_layernorm.weight"])
        for kind in ("weight", "bias"):
            if f"{hf}self_attn.q_proj.{kind}" in self.hf:
                yield self.split(f"{core}self_attention.linear_qkv.{kind}", self._qkv(hf, kind), 0)
        for x in ("q", "k"):
            name = "norm" if self.family == "minimax_m2" else "layernorm"
            if f"{hf}self_attn.{x}_norm.weight" in self.hf:
                yield self.whole(f"{core}self_attention.{x}_{name}.weight", self.hf[f"{hf}self_attn.{x}_norm.weight"])
        proj = "self_attention.linear_proj.weight"
        yield self.split(core + proj, self._layer(hf, proj), 1)

    def _qkv(self, at: str, kind: str) -> torch.Tensor:
        """With an output gate the query rows of a KV head are followed by the gate rows of the same heads."""
        if not self.family.startswith("qwen3"):
            return super()._qkv(at, kind)
        q, k, v = (self.hf[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv")
        kv, heads = self.config["num_key_value_heads"], self.config["num_attention_heads"]
        size, group = len(k) // kv, heads // kv
        out = []
        for head in range(self.tp[0] * kv // self.tp[1], (self.tp[0] + 1) * kv // self.tp[1]):
            mine = [q[(head * group + i) * 2 * size :][: 2 * size] for i in range(group)]
            out += [rows[:size] for rows in mine] + [rows[size:] for rows in mine]
            out += [k[head * size :][:size], v[head * size :][:size]]
        return torch.cat(out)

    def gated_delta(self, core: str, hf: str) -> Iterator[Shard]:
        """A transformers module as it is, on every rank."""
        yield self.whole(f"{core}self_attention.input_layernorm.weight", self.hf[f"{hf}input_layernorm.weight"])
        names = ["A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight"]
        inputs = DELTA_HALVES if self.family == "qwen3_next" else DELTA_PARTS
        for name in names + [f"{x}.weight" for x in inputs]:
            yield self.whole(f"{core}self_attention.linear_attn.{name}", self.hf[f"{hf}linear_attn.{name}"])

    def latent_attention(self, core: str, hf: str, *, indexed: bool) -> Iterator[Shard]:
        """Latent attention, and an indexer in some layers."""
        yield self.whole(f"{core}input_layernorm.weight", self.hf[f"{hf}input_layernorm.weight"])
        for name in (n for n in (*WHOLE, *HEADS) if n.split(".")[1] in MLA):
            local = self._layer(hf, name)
            yield self.whole(core + name, local) if name in WHOLE else self.split(core + name, local, 0)
        proj = "self_attention.linear_proj.weight"
        yield self.split(core + proj, self._layer(hf, proj), 1)
        if indexed:
            size = self.config["index_head_dim"]
            for name in SWAPPED:
                heads = self.hf[f"{hf}self_attn.indexer.{name}"].split(size)
                turned = torch.cat([torch.cat([h[size // 2 :], h[: size // 2]]) for h in heads])
                yield self.whole(f"{core}self_attention.{name}", turned)
            weights = "weights_proj.weight"
            yield self.whole(f"{core}self_attention.{weights}", self.hf[f"{hf}self_attn.indexer.{weights}"])

    def dense(self, core: str, hf: str) -> Iterator[Shard]:
        """A dense MLP and the norm before it."""
        norm, fc1, fc2 = (f"mlp.linear_{n}" for n in ("fc1.layer_norm_weight", "fc1.weight", "fc2.weight"))
        yield self.whole(core + norm, self.hf[f"{hf}post_attention_layernorm.weight"])
        if self.family == "glm4":
            gate, up = self.hf[f"{hf}mlp.gate_up_proj.weight"].chunk(2)
            rows = len(gate) // self.tp[1]
            local = torch.cat([half[self.tp[0] * rows : (self.tp[0] + 1) * rows] for half in (gate, up)])
        else:
            local = self._layer(hf, fc1)
        yield from self.gated(core + fc1, local)
        yield self.split(core + fc2, self._layer(hf, fc2), 1)

    def experts(self, core: str, hf: str) -> Iterator[Shard]:
        """Router, this rank's routed experts, the shared expert."""
        block = f"{hf}block_sparse_moe." if self.family == "minimax_m2" else f"{hf}mlp."
        yield self.whole(f"{core}pre_mlp_layernorm.weight", self.hf[f"{hf}post_attention_layernorm.weight"])
        yield self.whole(f"{core}mlp.router.weight", self.hf[f"{block}gate.weight"])
        bias = "e_score_correction_bias" if self.family == "minimax_m2" else "gate.e_score_correction_bias"
        if block + bias in self.hf:
            yield self.whole(f"{core}mlp.router.expert_bias", self.hf[block + bias])
        count = experts_of(self.config) // self.ep[1]
        for number in range(self.ep[0] * count, (self.ep[0] + 1) * count):
            gate, up, down = self.matrices(f"{block}experts.", number)
            yield from self.expert(f"{core}mlp.experts.experts.linear_fc1.weight", number, [gate, up])
            yield from self.expert(f"{core}mlp.experts.experts.linear_fc2.weight", number, [down])
        shared = f"{block}shared_experts." if self.family == "glm_moe_dsa" else f"{block}shared_expert."
        if f"{shared}down_proj.weight" in self.hf:
            yield from self.shared(f"{core}mlp.shared_experts.", shared)
        if f"{block}shared_expert_gate.weight" in self.hf:
            yield self.whole(f"{core}mlp.shared_experts.gate_weight", self.hf[f"{block}shared_expert_gate.weight"])

    def matrices(self, at: str, number: int) -> list[torch.Tensor]:
        """gate, up and down of one expert, however they are stored."""
        if f"{at}gate_up_proj" in self.hf:
            return [*self.hf[f"{at}gate_up_proj"][number].chunk(2), self.hf[f"{at}down_proj"][number]]
        names = ("w1", "w3", "w2") if self.family == "minimax_m2" else ("gate_proj", "up_proj", "down_proj")
        return [self.hf[f"{at}{number}.{name}.weight"] for name in names]

    def shared(self, core: str, hf: str) -> Iterator[Shard]:
        """The shared expert, tensor parallel like a dense MLP."""
        rank, size = self.tp
        halves = [self.hf[f"{hf}{x}_proj.weight"].chunk(size)[rank] for x in ("gate", "up")]
        yield from self.gated(f"{core}linear_fc1.weight", torch.cat(halves))
        yield self.split(f"{core}linear_fc2.weight", self.hf[f"{hf}down_proj.weight"].chunk(size, dim=1)[rank], 1)


def stage_shards(world: World, hf: Path) -> list[Shard]:
    """All shards of this rank."""
    expected = PluginExpected(hf)
    count = expected.config["num_hidden_layers"]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    shards = list(expected.shards(range(count) if world.pp == 1 else (range(2), range(2, count))[stage]))
    assert len({(s.key, s.global_offset) for s, _ in shards}) == len(shards) > 10
    return shards


def place(shard: ShardedTensor) -> str:
    """A tensor may be asked for in several pieces."""
    return f"{shard.key}{shard.global_offset}"


def is_elsewhere(name: str) -> bool:
    """Not part of the Megatron model: vision, and a prediction layer's copies of embedding and output layer."""
    return name.startswith("model.visual.") or name.endswith((".3.embed_tokens.weight", ".3.shared_head.head.weight"))


def load_by_hand(world: World, hf: Path, folder: Path) -> None:
    """Every shard of this rank, and between the ranks every tensor of the checkpoint."""
    shards = stage_shards(world, hf)
    state: dict[str, Any] = {place(shard): shard for shard, _ in shards}
    loaded, unused, lacking = dist_checkpointing.load({"model": state}, str(folder), strict="return_all")
    assert not lacking
    assert not [key for key in unused if "_extra_state" not in key and not is_elsewhere(key)]
    for shard, tensor in shards:
        found = loaded["model"][place(shard)]
        assert found.dtype == tensor.dtype, shard.key
        assert torch.equal(found, tensor), shard.key


def save_by_hand(world: World, hf: Path, folder: Path) -> None:
    """A checkpoint by megatron-core's own writer."""
    shards = stage_shards(world, hf)
    for shard, tensor in shards:
        shard.data.copy_(tensor)
    state = {"model": {place(shard): shard for shard, _ in shards}, "iteration": 1}
    dist_checkpointing.save(state, str(folder), content_metadata={"non_homogeneous_layers": True})


MOE = ("minimax_m2", "qwen3_next", "qwen3_5_moe", "glm_moe_dsa")
CASES = [(family, world) for family in ("glm4", "qwen3_5") for world in (TP2, PP2)]
CASES += [(family, world) for family in MOE for world in (TP2, PP2, EP2)]


@pytest.mark.parametrize(("family", "world"), CASES, ids=lambda v: str(v))
def test_megatron_loads_the_shards_of_slimes_own_modules(hub, converted, family, world):
    run(world, load_by_hand, hub(family), converted(family))


@pytest.mark.parametrize(("family", "world"), [("glm4", TP2), ("qwen3_5", PP2), *((f, EP2) for f in MOE)], ids=str)
def test_such_checkpoints_convert_back(tmp_path, hub, family, world):
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    run(world, save_by_hand, hub(family), folder)
    torch_dist_to_hf(folder, tmp_path / "back", like=hub(family))
    back, theirs = tensors_of(tmp_path / "back"), tensors_of(hub(family))
    assert back.keys() == {name for name in theirs if not is_elsewhere(name)}
    for name, tensor in back.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name

"""MLP of one layer: dense, or routed and shared experts."""

from __future__ import annotations

from slimecli.model_specs.spec import Moe
from slimecli.weights.maps.layouts import Place
from slimecli.weights.maps.rule import Rule, part, stacked_rows, whole


def mlp(at: Place) -> list[Rule]:
    """All rules of a layer's MLP, with the norm before it."""
    if at.is_moe and at.spec.moe is not None:
        return _experts(at, at.spec.moe)
    core, hf = f"{at.core}mlp.", f"{at.hf}mlp."
    norm = whole(f"{at.hf}post_attention_layernorm.weight", f"{core}linear_fc1.layer_norm_weight", (at.spec.hidden,))
    return [norm, *_dense(at, hf, core, at.spec.ffn, fused=at.names.fused_gate_up)]


def _dense(at: Place, hf: str, core: str, ffn: int, *, fused: bool = False) -> list[Rule]:
    hidden, fc1 = at.spec.hidden, f"{core}linear_fc1.weight"
    down = whole(f"{hf}down_proj.weight", f"{core}linear_fc2.weight", (hidden, ffn))
    if fused:
        return [whole(f"{hf}gate_up_proj.weight", fc1, (2 * ffn, hidden)), down]
    return [*stacked_rows([f"{hf}gate_proj.weight", f"{hf}up_proj.weight"], fc1, (ffn, hidden)), down]


def _experts(at: Place, moe: Moe) -> list[Rule]:
    hidden, hf, core = at.spec.hidden, at.hf + at.names.mlp, f"{at.core}mlp."
    out = [
        whole(f"{at.hf}post_attention_layernorm.weight", f"{at.core}pre_mlp_layernorm.weight", (hidden,)),
        whole(f"{hf}gate.weight", f"{core}router.weight", (moe.experts, hidden), keep_dtype=at.names.float32_router),
    ]
    if moe.bias:
        out.append(whole(hf + at.names.router_bias, f"{core}router.expert_bias", (moe.experts,), keep_dtype=True))
    out += _stacked(at, moe) if _is_stacked(at) else _one_by_one(at, moe)
    if moe.shared_ffn:
        shared = f"{core}shared_experts."
        out += _dense(at, hf + at.names.shared, shared, moe.shared_ffn)
        if moe.shared_gate:
            out.append(whole(f"{hf}shared_expert_gate.weight", f"{shared}gate_weight", (1, hidden)))
    return out


def _is_stacked(at: Place) -> bool:
    """What is stored decides; the hub stacks the experts of decoder layers only."""
    hf, stored = f"{at.hf}{at.names.mlp}experts.", at.stored or {}
    if f"{hf}gate_up_proj" in stored or f"{hf}0.{at.names.gate_up_down[0]}.weight" in stored:
        return f"{hf}gate_up_proj" in stored
    return at.names.stacked_experts and not at.predicts


def _stacked(at: Place, moe: Moe) -> list[Rule]:
    hf, core, hidden = f"{at.hf}{at.names.mlp}experts.", f"{at.core}mlp.experts.experts.", at.spec.hidden
    return [
        whole(f"{hf}gate_up_proj", f"{core}linear_fc1.weight", (moe.experts, 2 * moe.ffn, hidden)),
        whole(f"{hf}down_proj", f"{core}linear_fc2.weight", (moe.experts, hidden, moe.ffn)),
    ]


def _one_by_one(at: Place, moe: Moe) -> list[Rule]:
    """Chunks as Megatron writes them: one per expert, gate and up apart."""
    hf, core, hidden = f"{at.hf}{at.names.mlp}experts.", f"{at.core}mlp.experts.experts.", at.spec.hidden
    fc1, fc2 = f"{core}linear_fc1.weight", f"{core}linear_fc2.weight"
    full1, full2 = (moe.experts, 2 * moe.ffn, hidden), (moe.experts, hidden, moe.ffn)
    into, back = (moe.ffn, hidden), (hidden, moe.ffn)
    gate, up, down = (f"{name}.weight" for name in at.names.gate_up_down)
    out = []
    for e in range(moe.experts):
        out += [
            part(f"{hf}{e}.{gate}", fc1, into, full1, (e, 0, 0)),
            part(f"{hf}{e}.{up}", fc1, into, full1, (e, moe.ffn, 0)),
            part(f"{hf}{e}.{down}", fc2, back, full2, (e, 0, 0)),
        ]
    return out

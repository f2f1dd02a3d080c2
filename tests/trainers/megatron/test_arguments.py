"""[megatron] is understood, or told to be wrong before anything starts; what is forced says why."""

from __future__ import annotations

import importlib.util

import pytest

from slimecli.errors import UsageError
from slimecli.model_specs import get_spec
from slimecli.trainers.megatron.arguments import problems_of, settings_of
from tests.trainers import made

DENSE, EXPERTS = get_spec("qwen3-0.6b"), get_spec("qwen3-30b-a3b")

PREDICTS, MTP = get_spec("mimo-7b-rl"), "megatron.mtp_loss_scaling_factor"


def settings(*overrides, spec=DENSE, on_gpu=False):
    return settings_of(made.recipe("trainer.backend=megatron", *overrides), spec, on_gpu=on_gpu)


def test_flags_reach_their_part_under_either_spelling():
    for separator in "_-":
        name = separator.join(("tensor", "model", "parallel", "size"))
        found = settings(
            f"megatron.{name}=2", "megatron.overlap-grad-reduce=true", "trainer.processes=2", "trainer.lr=0.5"
        )
        assert found.layout.tp == 2
        assert found.transformer["tensor_model_parallel_size"] == 2
        assert found.ddp["overlap_grad_reduce"] is True
        assert "overlap_grad_reduce" not in found.transformer
        assert found.optimizer["lr"] == 0.5


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        (DENSE, ("megatron.recompute_granularty=full",), "did you mean 'recompute_granularity'"),
        (DENSE, ("megatron.decoupled_lr=0.1",), "the recipe says that in trainer.lr"),
        (DENSE, ("megatron.bf16=true",), "the recipe says that in model.dtype"),
        (DENSE, ("megatron.hidden_size=64",), "it follows from the model (qwen3-0.6b)"),
        (DENSE, ("megatron.calculate_per_token_loss=false",), "losses carry global denominators"),
        (DENSE, ("megatron.mtp_num_layers=1",), "how many multi-token-prediction layers there are follows from the"),
        (DENSE, (f"{MTP}=0.1",), "qwen3-0.6b has no prediction layers to train"),
        (PREDICTS, ("megatron.mtp-num-layers=1",), "it follows from the model (mimo-7b-rl)"),
        (PREDICTS, (f"{MTP}=-0.1",), "it takes a finite number of 0 or above"),
        (PREDICTS, (f"{MTP}=inf",), "it takes a finite number of 0 or above"),
        (PREDICTS, (f"{MTP}=0.1", "trainer.bridge=mbridge"), "and trainer.bridge = 'mbridge': keep one of them"),
        (PREDICTS, (f"{MTP}=0.1", "megatron.fp8=hybrid"), "mtp_loss_scaling_factor and fp8: keep one of them"),
        (PREDICTS, (f"{MTP}=0.1", "megatron.spec=tests.trainers.megatron.test_own_spec:same"), "own layers only"),
        (DENSE, ("megatron.tensor_model_parallel_size=0",), "it takes a whole number above 0"),
        (DENSE, ("megatron.overlap_param_gather=true",), "needs overlap_grad_reduce"),
        (EXPERTS, ("megatron.moe_token_dispatcher_type=allgather",), "micro-batches differ in length"),
        (
            EXPERTS,
            ("megatron.moe_enable_routing_replay=true", "megatron.moe_router_fusion=true"),
            "has no effect with moe_router_fusion",
        ),
        (get_spec("glm-5"), (), "has a sparse-attention indexer"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_errors(spec, options, said):
    with pytest.raises(UsageError) as caught:
        settings(*options, spec=spec)
    assert said in str(caught.value)


def test_prediction_layers_are_trained_where_their_loss_has_a_weight():
    assert settings(f"{MTP}=0.2", spec=PREDICTS).prediction == 0.2
    assert settings(spec=PREDICTS).prediction == settings(f"{MTP}=0", spec=PREDICTS).prediction == 0.0
    assert settings(f"{MTP}=0.2", spec=PREDICTS).transformer["mtp_num_layers"] is None


OFFLOAD = ("megatron.optimizer_cpu_offload=true", "model.dtype=bfloat16")
HALF = "megatron.optimizer_offload_fraction=0.5"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (OFFLOAD, "needs optimizer_offload_fraction, the share that goes"),
        ((HALF,), "has no effect without optimizer_cpu_offload"),
        ((*OFFLOAD, HALF, "model.dtype=float32"), "needs model.dtype = 'bfloat16', not 'float32'"),
        ((*OFFLOAD, HALF, "megatron.use_distributed_optimizer=false"), "needs use_distributed_optimizer = true"),
        ((*OFFLOAD, HALF, "megatron.use_precision_aware_optimizer=true"), "keep one of them"),
        (("megatron.use_precision_aware_optimizer=true",), "needs Transformer Engine, which is not installed"),
        (("megatron.gradient_accumulation_fusion=true",), "needs Transformer Engine or Apex; neither is installed"),
        (("megatron.overlap_param_gather=true",), "needs overlap_grad_reduce = true"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_what_a_gpu_does_not_make_up_for(options, said):
    with pytest.raises(UsageError) as caught:
        settings(*options, on_gpu=True)
    assert said in str(caught.value)


def test_what_needs_a_gpu_is_taken_where_there_is_one(monkeypatch):
    found = settings(*OFFLOAD, HALF, on_gpu=True)
    assert found.optimizer["optimizer_cpu_offload"] and found.optimizer["optimizer_offload_fraction"] == 0.5
    with pytest.raises(UsageError, match="optimizer_cpu_offload needs a GPU, and there is none here"):
        settings(*OFFLOAD, HALF)
    with pytest.raises(UsageError, match="gradient_accumulation_fusion = True: slime sets False, since there"):
        settings("megatron.gradient_accumulation_fusion=true")
    find = importlib.util.find_spec
    there = ("transformer_engine", "fused_weight_gradient_mlp_cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name in there or find(name, *rest))
    fused = settings("megatron.gradient_accumulation_fusion=true", on_gpu=True)
    assert fused.transformer["gradient_accumulation_fusion"] is True


def test_all_errors_are_told_at_once():
    recipe = made.recipe("trainer.backend=megatron", "megatron.lr=1", "megatron.num_layers=2", "megatron.bf15=true")
    found = problems_of(recipe, DENSE, on_gpu=False)
    assert [e.split(":")[0].split(" is ")[0] for e in found] == [
        "[megatron] lr",
        "[megatron] num_layers",
        "[megatron] bf15",
    ]


def test_what_interleaving_and_devices_force():
    interleaved = (
        "trainer.processes=2",
        "megatron.pipeline_model_parallel_size=2",
        "megatron.virtual_pipeline_model_parallel_size=7",
    )
    on_gpu, on_cpu = (settings(*interleaved, on_gpu=gpu) for gpu in (True, False))
    assert not on_gpu.transformer["variable_seq_lengths"]
    assert on_gpu.transformer["overlap_p2p_comm"]
    assert not on_gpu.transformer["batch_p2p_comm"]
    assert not on_cpu.transformer["overlap_p2p_comm"]
    plain = settings(*interleaved[:2], on_gpu=True)
    assert plain.transformer["variable_seq_lengths"]
    assert "overlap_p2p_comm" not in plain.transformer
    assert all(reason for _, _, reason in (*on_gpu.forced, *on_cpu.forced, *plain.forced))
    assert "use_cpu_initialization" not in {name for name, _, _ in on_gpu.forced}

import dataclasses

import pytest

from slimecli.model_specs import RopeScaling, get_spec
from slimecli.model_specs.megatron import arguments, command_line

COMMON = "swiglu disable-bias-linear normalization=RMSNorm"
UNTIED = "untie-embeddings-and-output-weights"
GQA = "group-query-attention"
MOE = (
    "moe-grouped-gemm moe-permute-fusion moe-token-dispatcher-type=alltoall moe-router-dtype=fp32 moe-aux-loss-coeff=0"
)
SOFTMAX = f"{MOE} moe-router-score-function=softmax"
SIGMOID = (
    f"{MOE} moe-router-score-function=sigmoid moe-router-pre-softmax moe-router-enable-expert-bias"
    " moe-router-bias-update-rate=0 moe-router-load-balancing-type=seq_aux_loss"
)
MLA = "multi-latent-attention qk-layernorm position-embedding-type=rope kv-lora-rank=512 qk-pos-emb-head-dim=64"
DEEPSEEK = f"{MLA} no-rope-fusion qk-head-dim=128 v-head-dim=128 q-lora-rank=1536 mscale=1.0 mscale-all-dim=1.0"
GATED = (
    f"qk-layernorm {GQA} attention-output-gate apply-layernorm-1p position-embedding-type=rope rotary-percent=0.25"
    " norm-epsilon=1e-06 rotary-base=10000000 kv-channels=256"
)
GLM4 = (
    "post-self-attn-layernorm post-mlp-layernorm rotary-interleaved rotary-percent=0.5 no-rope-fusion"
    " use-rotary-position-embeddings rotary-base=10000 norm-epsilon=1e-05 vocab-size=151552"
)

UPSTREAM = {
    "qwen2.5-7b": f"{UNTIED} {GQA} add-qkv-bias num-layers=28 hidden-size=3584 ffn-hidden-size=18944"
    " num-attention-heads=28 num-query-groups=4 rotary-base=1000000 vocab-size=152064 norm-epsilon=1e-06",
    "qwen3-4b": f"{GQA} qk-layernorm num-layers=36 hidden-size=2560 ffn-hidden-size=9728 num-attention-heads=32"
    " num-query-groups=8 kv-channels=128 rotary-base=1000000 vocab-size=151936 norm-epsilon=1e-06",
    "llama3.1-8b-instruct": f"{UNTIED} {GQA} num-layers=32 hidden-size=4096 ffn-hidden-size=14336"
    " num-attention-heads=32 num-query-groups=8 max-position-embeddings=131072 use-rotary-position-embeddings"
    " rotary-base=500000 vocab-size=128256 kv-channels=128 use-rope-scaling norm-epsilon=1e-05",
    "mimo-7b-rl": f"{UNTIED} {GQA} add-qkv-bias num-layers=36 hidden-size=4096 ffn-hidden-size=11008"
    " num-attention-heads=32 num-query-groups=8 rotary-base=640000 vocab-size=151680 max-position-embeddings=32768"
    " norm-epsilon=1e-05 mtp-num-layers=1",
    "glm-z1-9b-0414": f"{UNTIED} {GQA} {GLM4} add-qkv-bias num-layers=40 hidden-size=4096 ffn-hidden-size=13696"
    " num-attention-heads=32 num-query-groups=2",
    "qwen3-30b-a3b": f"{UNTIED} {GQA} {SOFTMAX} qk-layernorm num-attention-heads=32 num-query-groups=4 kv-channels=128"
    " num-layers=48 hidden-size=2048 ffn-hidden-size=6144 rotary-base=1000000 vocab-size=151936 norm-epsilon=1e-06"
    " moe-ffn-hidden-size=768 moe-router-topk=8 num-experts=128 moe-layer-freq=0,48",
    "qwen3-235b-a22b": f"{UNTIED} {GQA} {SOFTMAX} qk-layernorm num-attention-heads=64 num-query-groups=4"
    " kv-channels=128 num-layers=94 hidden-size=4096 ffn-hidden-size=12288 rotary-base=1000000 vocab-size=151936"
    " moe-ffn-hidden-size=1536 moe-router-topk=8 num-experts=128 moe-layer-freq=0,94",
    "glm-4.5-air": f"{UNTIED} {GQA} {SIGMOID} add-qkv-bias num-attention-heads=96 num-query-groups=8 kv-channels=128"
    " num-layers=46 hidden-size=4096 ffn-hidden-size=10944 rotary-percent=0.5 vocab-size=151552 rotary-base=1000000"
    " moe-ffn-hidden-size=1408 moe-shared-expert-intermediate-size=1408 moe-router-topk=8 num-experts=128"
    " moe-layer-freq=1,45",
    "glm-4.7": f"{UNTIED} {GQA} {SIGMOID} add-qkv-bias qk-layernorm num-attention-heads=96 num-query-groups=8"
    " kv-channels=128 num-layers=92 hidden-size=5120 ffn-hidden-size=12288 rotary-percent=0.5 vocab-size=151552"
    " rotary-base=1000000 moe-ffn-hidden-size=1536 moe-shared-expert-intermediate-size=1536 moe-router-topk=8"
    " num-experts=160 moe-layer-freq=3,89 moe-router-topk-scaling-factor=2.5",
    "minimax-m2.5": f"{UNTIED} {GQA} {MOE} qk-layernorm num-layers=62 hidden-size=3072 ffn-hidden-size=1536"
    " num-attention-heads=48 kv-channels=128 num-query-groups=8 norm-epsilon=1e-06 vocab-size=200064 rotary-percent=0.5"
    " rotary-base=5000000 no-rope-fusion num-experts=256 moe-ffn-hidden-size=1536 moe-router-topk=8 moe-layer-freq=0,62"
    " moe-router-score-function=sigmoid moe-router-pre-softmax moe-router-enable-expert-bias",
    "deepseek-r1": f"{UNTIED} {DEEPSEEK} {SIGMOID} num-layers=61 hidden-size=7168 ffn-hidden-size=18432"
    " num-attention-heads=128 kv-channels=128 norm-epsilon=1e-06 vocab-size=129280 rotary-scaling-factor=40"
    " rotary-base=10000 num-experts=256 moe-layer-freq=3,58 moe-ffn-hidden-size=2048 moe-router-topk=8"
    " moe-shared-expert-intermediate-size=2048 moe-router-group-topk=4 moe-router-num-groups=8"
    " moe-router-topk-scaling-factor=2.5",
    "kimi-k2-thinking": f"{UNTIED} {DEEPSEEK} {SIGMOID} num-layers=61 hidden-size=7168 ffn-hidden-size=18432"
    " num-attention-heads=64 norm-epsilon=1e-05 vocab-size=163840 rotary-scaling-factor=64 rotary-base=50000"
    " num-experts=384 moe-layer-freq=1,60 moe-ffn-hidden-size=2048 moe-router-topk=8"
    " moe-shared-expert-intermediate-size=2048 moe-router-topk-scaling-factor=2.827",
    "moonlight-16b-a3b": f"{UNTIED} {MLA} {SIGMOID} no-rope-fusion num-layers=27 hidden-size=2048 ffn-hidden-size=11264"
    " num-attention-heads=16 kv-channels=128 norm-epsilon=1e-05 rotary-percent=1.0 vocab-size=163840 qk-head-dim=128"
    " v-head-dim=128 rotary-base=50000 num-experts=64 moe-layer-freq=1,26 moe-ffn-hidden-size=1408 moe-router-topk=6"
    " moe-shared-expert-intermediate-size=2816 moe-router-topk-scaling-factor=2.446",
    "glm-4.7-flash": f"{UNTIED} {MLA} {SIGMOID} no-rope-fusion num-layers=47 hidden-size=2048 ffn-hidden-size=10240"
    " num-attention-heads=20 q-lora-rank=768 qk-head-dim=192 v-head-dim=256 kv-channels=192 vocab-size=154880"
    " rotary-base=1000000 moe-layer-freq=1,46 num-experts=64 moe-shared-expert-intermediate-size=1536"
    " moe-router-topk=4 moe-ffn-hidden-size=1536 moe-router-topk-scaling-factor=1.8",
    "glm-5.2": f"{UNTIED} {MLA} {SIGMOID} num-layers=78 hidden-size=6144 ffn-hidden-size=12288 num-attention-heads=64"
    " q-lora-rank=2048 qk-head-dim=192 v-head-dim=256 kv-channels=192 vocab-size=154880 rotary-base=8000000"
    " moe-layer-freq=3,75 num-experts=256 moe-shared-expert-intermediate-size=2048 moe-router-topk=8"
    " moe-ffn-hidden-size=2048 moe-router-topk-scaling-factor=2.5",
    "qwen3-next-80b-a3b-instruct": f"{UNTIED} {GATED} {SOFTMAX} moe-shared-expert-gate num-attention-heads=16"
    " num-query-groups=2 num-layers=48 hidden-size=2048 ffn-hidden-size=5120 vocab-size=151936 moe-ffn-hidden-size=512"
    " moe-shared-expert-intermediate-size=512 moe-router-topk=10 moe-layer-freq=0,48 num-experts=512",
    "qwen3.5-4b": f"{GATED} num-attention-heads=16 num-query-groups=4 num-layers=32 hidden-size=2560"
    " ffn-hidden-size=9216 vocab-size=248320",
    "qwen3.5-27b": f"{UNTIED} {GATED} num-attention-heads=24 num-query-groups=4 num-layers=64 hidden-size=5120"
    " ffn-hidden-size=17408 vocab-size=248320",
    "qwen3.5-35b-a3b": f"{UNTIED} {GATED} {SOFTMAX} moe-shared-expert-gate num-attention-heads=16 num-query-groups=2"
    " num-layers=40 hidden-size=2048 ffn-hidden-size=512 vocab-size=248320 moe-ffn-hidden-size=512"
    " moe-shared-expert-intermediate-size=512 moe-router-topk=8 moe-layer-freq=0,40 num-experts=256",
}
"""what slime's scripts/models/*.sh say of the model itself (Megatron's `--moe-layer-freq` as dense,expert layers)"""

OURS = {"max-position-embeddings", "rotary-percent", "use-rotary-position-embeddings", "position-embedding-type"}
"""flags that upstream leaves at Megatron's default, or says in another way"""
OURS_TOO = {"rope-type", "mtp-num-layers", "kv-channels", "norm-epsilon", "no-rope-fusion", "rope-scaling-factor"}
BALANCING = {"moe-router-load-balancing-type", "moe-router-bias-update-rate"}
"""without an auxiliary loss the type does not matter; a bias that is not updated stays what the checkpoint has"""


def plain(args):
    freq = args.get("moe-layer-freq")
    return args if freq is None else {**args, "moe-layer-freq": f"{freq.count(0)},{freq.count(1)}"}


@pytest.mark.parametrize("name", UPSTREAM)
def test_arguments_are_those_of_slimes_scripts(name):
    args = plain(get_spec(name).megatron_args())
    wanted = dict(item.partition("=")[::2] for item in f"{COMMON} {UPSTREAM[name]}".split())
    for flag, value in wanted.items():
        mine = args.get(flag)
        if value == "":
            assert mine is True, flag
        elif isinstance(mine, int | float):
            assert mine == float(value), flag
        else:
            assert mine == value, flag
    assert args.keys() - wanted.keys() <= OURS | OURS_TOO | (BALANCING if "minimax" in name else set())


MIXTRAL_8X7B = (
    f"{UNTIED} {GQA} max-position-embeddings=32768 num-layers=32 hidden-size=4096 ffn-hidden-size=14336"
    " num-attention-heads=32 num-query-groups=8 normalization=RMSNorm position-embedding-type=rope swiglu"
    " disable-bias-linear rotary-base=1000000 num-experts=8 moe-router-topk=2 moe-grouped-gemm"
)
"""what Megatron-LM's own examples/mixtral/train_mixtral_8x7b_distributed.sh says of the model"""


def test_mixtral_is_megatron_lms_example():
    args = get_spec("mixtral-8x7b").megatron_args()
    for item in MIXTRAL_8X7B.split():
        flag, _, value = item.partition("=")
        assert str(args[flag]) == (value or "True"), flag
    # the weights of the chosen two are a softmax over the two
    assert args["moe-ffn-hidden-size"] == 14336 and "moe-router-pre-softmax" not in args


def test_qwen2_moe_has_a_gated_shared_expert_and_takes_scores_as_they_are():
    args = get_spec("qwen2-57b-a14b").megatron_args()
    assert (args["moe-shared-expert-intermediate-size"], args["moe-ffn-hidden-size"]) == (20480, 2560)
    assert args["moe-shared-expert-gate"] and args["moe-router-pre-softmax"] and args["add-qkv-bias"]
    assert "qk-layernorm" not in args


def test_flags_that_must_be_absent():
    tied = get_spec("qwen3-4b").megatron_args()
    assert UNTIED not in tied and "add-qkv-bias" not in tied and "num-experts" not in tied
    assert "q-lora-rank" not in get_spec("moonlight-16b-a3b").megatron_args()
    assert "rotary-interleaved" not in get_spec("deepseek-v3").megatron_args()  # Megatron refuses it with MLA
    assert "qk-layernorm" not in get_spec("glm-4.5-air").megatron_args()
    assert get_spec("glm-4-32b-0414").megatron_args()["num-query-groups"] == 2


def test_scaling():
    assert get_spec("llama3.2-3b").megatron_args()["rope-scaling-factor"] == 32.0
    assert get_spec("moonlight-16b-a3b").megatron_args()["rope-type"] == "rope"
    assert get_spec("kimi-k2-instruct").megatron_args()["rope-type"] == "yarn"
    scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_positions=32768)
    args = arguments(dataclasses.replace(get_spec("qwen2.5-7b"), rope_scaling=scaling))
    assert args["position-embedding-type"] == "yarn" and args["rotary-scaling-factor"] == 4.0
    assert args["yarn-original-max-position-embeddings"] == 32768 and args["yarn-beta-fast"] == 32.0


def test_unnormalized_softmax_is_taken_over_all_experts():
    spec = get_spec("qwen3-30b-a3b")
    assert "moe-router-pre-softmax" not in arguments(spec)
    other = dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, normalize=False))
    assert arguments(other)["moe-router-pre-softmax"] is True


def test_command_line():
    line = command_line(get_spec("glm-4.5"))
    assert "--moe-layer-freq '[0]*3+[1]*89'" in line and "--swiglu --" in line and "--num-layers 92" in line

"""Every algorithm with its switches, through the command line."""

import math

import pytest

from slimecli.algos import ALGORITHMS
from slimecli.recipe import load_recipe, parse_override, recipe_fields
from tests.equivalence.test_every_option import OPTIONS
from tests.equivalence.test_layouts import SMOOTH, STEPS, assert_close_run
from tests.forked import succeed
from tests.tiny_run import metrics, sets, weights

TWO_STEPS = ("trainer.steps_per_rollout=2", "trainer.global_batch_size=8")
TIS = ("algo.correction.level='token'", "algo.correction.low=0.5", "algo.correction.high=5")
RUNS = {
    "grpo": (
        *TWO_STEPS,
        "algo.old_log_probs='engine'",
        "algo.opsm_delta=1e-4",
        "algo.dual_clip=3",
        "algo.eps_clip=0.1",
    ),
    "dr_grpo": (
        "algo.aggregation='constant'",
        "algo.constant_length=20",
        *TIS,
        "algo.correction.mode='mask'",
        "algo.correction.normalize=true",
    ),
    "gspo": (*TWO_STEPS, "algo.eps_clip=3e-4", "algo.eps_clip_high=4e-4", "algo.correction.reject_level='sequence'"),
    "cispo": ("algo.eps_clip=1", "algo.eps_clip_high=4", "algo.rewards_normalization=false", *TIS),
    "rloo": ("algo.kl_coef=0.1", "algo.kl_place='reward'", "algo.whiten_advantages=true", "algo.correction.veto=1e-4"),
    "reinforce_plus_plus": ("algo.kl_coef=0.1", "algo.kl_place='reward'", "algo.gamma=0.99", *TWO_STEPS),
    "ppo": (
        *("algo.critic_warmup=1", "algo.critic_lr=1e-2", "algo.value_clip=5", "algo.gae_lambda=0.95"),
        *("algo.gamma=0.99", "algo.kl_coef=0.01", "algo.kl_place='reward'", "algo.whiten_advantages=true"),
    ),
    "reinforce_plus_plus_baseline": (
        *("algo.kl_coef=0.1", "algo.kl_type='low_var_kl'", "algo.kl_unbiased=true"),
        *(
            "algo.correction.reject_level='geometric'",
            "algo.correction.reject_low=0.9",
            "algo.correction.reject_high=1.1",
        ),
    ),
}
"""algorithm -> overrides"""
SEEN = {
    "grpo": ("opsm_masked", "dual_clip_fraction"),
    "dr_grpo": ("correction_outside", "correction_weight"),
    "gspo": ("correction_rejected",),
    "rloo": ("kl", "correction_rejected"),
    "reinforce_plus_plus": ("kl",),
    "ppo": ("kl", "value_loss", "value_clip_fraction", "critic_grad_norm"),
}
"""algorithm -> metrics that its overrides bring with them"""


WHOLE_ANSWERS = ("gspo", "ppo", "reinforce_plus_plus_baseline")
"""those of RUNS whose loss looks at whole answers: tried with small micro-batches too"""


def run(name, folder, *extra):
    words = sets(f"steps={STEPS}", *SMOOTH, f"algo.name='{name}'", *RUNS[name], *extra)
    succeed("run", "--recipe", "quickstart", "--run", "r", *words, folder=folder)
    return folder / "runs" / "r"


@pytest.mark.parametrize("name", RUNS)
def test_learns(name, tmp_path):
    made = run(name, tmp_path)
    for record in metrics(made):
        assert record["train/grad_norm"] > 0 and all(math.isfinite(v) for v in record.values() if isinstance(v, float))
        for metric in SEEN.get(name, ()):
            assert f"train/{metric}" in record
    moved, start = (weights(made / f"weights/v{version:06d}") for version in (STEPS, 1))
    assert any((moved[k] - start[k]).abs().max() > 0 for k in moved)
    if name in WHOLE_ANSWERS:
        (tmp_path / "cut").mkdir()
        cut = run(name, tmp_path / "cut", "trainer.max_tokens_per_micro_batch=64", "trainer.shared_prefix=false")
        assert_close_run(made, cut)


def test_every_algorithm_and_every_field_of_algo_is_tried():
    assert set(RUNS) | {"sft"} == set(ALGORITHMS), "sft is a stage of every run"
    tried = {".".join(parse_override(text)[0]) for words in (OPTIONS, *RUNS.values()) for text in words}
    known = {name for name, _, _ in recipe_fields() if name.startswith("algo.")}
    assert known - tried == {"algo.name", "algo.critic_offload"}, "what Megatron alone has is in test_megatron_ppo.py"
    for name, words in RUNS.items():
        load_recipe("quickstart", (f"algo.name={name}", *words))

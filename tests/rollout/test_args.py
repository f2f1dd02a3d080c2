"""The recipe under slime's flag names."""

import pytest

from slimecli.recipe import load_recipe
from slimecli.rollout.args import DERIVED, FLAGS, HookArgs


def args(*overrides):
    return HookArgs(load_recipe("", overrides))


def test_every_flag_can_be_read():
    made = args()
    for name in (*FLAGS, *DERIVED):
        getattr(made, name)
    assert not set(FLAGS) & set(DERIVED)


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [
        ((), {"kl_coef": 0.0, "kl_loss_coef": 0.0, "use_kl_loss": False, "use_tis": False, "use_opsm": False}),
        (("algo.kl_coef=0.1",), {"kl_coef": 0.0, "kl_loss_coef": 0.1, "use_kl_loss": True}),
        (("algo.kl_coef=0.1", "algo.kl_place=reward"), {"kl_coef": 0.1, "kl_loss_coef": 0.0, "use_kl_loss": False}),
        (("algo.correction.level=token", "algo.correction.high=5"), {"use_tis": True, "tis_clip": 5.0}),
        (("algo.opsm_delta=1e-4",), {"use_opsm": True, "opsm_delta": 1e-4}),
        (("algo.old_log_probs=engine",), {"use_rollout_logprobs": True}),
        (("algo.aggregation=token",), {"calculate_per_token_loss": True, "loss_type": "policy_loss"}),
        (("algo.name=sft",), {"loss_type": "sft_loss"}),
        (("algo.name=reinforce_plus_plus",), {"normalize_advantages": True}),
        (("algo.dual_clip=3", "algo.gamma=0.9"), {"eps_clip_c": 3.0, "gamma": 0.9, "normalize_advantages": False}),
    ],
)
def test_the_algorithms_flags_say_what_slime_would(overrides, flags):
    made = args(*overrides)
    assert {name: getattr(made, name) for name in flags} == flags


def test_a_wrong_name_is_told_with_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'use_tis'"):
        _ = args().use_tiss

"""Contradictions in [algo], and what about it deserves a look."""

import json

import pytest

from slimecli.algos import ALGORITHMS
from slimecli.model_specs import get_spec
from slimecli.plan_algo import GROUP_RELATIVE, algorithm_warnings, check_algorithm
from slimecli.plan_checks import check_names
from slimecli.plan_numbers import disk_bytes, trainer_bytes
from slimecli.recipe import load_recipe


def problems(*overrides):
    return list(check_algorithm(load_recipe("", overrides), None))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_goes_with_the_defaults(name):
    extra = ("algo.aggregation=constant",) if name == "dr_grpo" else ()
    assert problems(f"algo.name={name}", *extra) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("algo.constant_length=7",), "no effect with `algo.aggregation`"),
        (("algo.name=dr_grpo",), "set it to 'constant', or use grpo with algo.std_normalization=false"),
        (("algo.dual_clip=0.5",), "set it above 1, or to 0"),
        (("algo.dual_clip=3", "algo.name=cispo"), "no effect with cispo"),
        (("algo.kl_place=reward",), "`algo.kl_place` has no effect with `algo.kl_coef` = 0"),
        (("algo.kl_unbiased=true",), "`algo.kl_unbiased` has no effect with `algo.kl_coef` = 0"),
        (("algo.kl_coef=0.1", "algo.kl_place=reward", "algo.kl_unbiased=true"), "use 'loss'"),
        (("algo.gamma=0.9",), "`algo.gamma` has no effect with grpo"),
        (("algo.name=rloo", "algo.std_normalization=false"), "no effect with rloo"),
        (("algo.name=reinforce_plus_plus", "algo.rewards_normalization=false"), "no effect with reinforce_plus_plus"),
        (("algo.name=sft", "algo.old_log_probs=published"), "`algo.old_log_probs` have no effect with sft"),
        (("algo.gae_lambda=0.9",), "`algo.gae_lambda` has no effect with grpo, which has no critic"),
        (("algo.critic_lr=1e-5", "algo.name=rloo"), "`algo.critic_lr` has no effect with rloo"),
        (("algo.name=ppo", "algo.critic_warmup=100"), "leaves none of the 100 `steps`"),
        (("algo.critic_offload=true",), "`algo.critic_offload` has no effect with grpo, which has no critic"),
        (("algo.name=mine.py:OWN", "algo.critic_offload=true"), "is what `trainer.backend` = 'megatron' can do"),
        (("algo.name=ppo", "algo.critic_offload=true"), "is what `trainer.backend` = 'megatron' can do"),
        (("algo.name=sft", "algo.old_log_probs=engine"), "no effect with sft"),
        (("algo.old_log_probs=engine", "algo.correction.level=token"), "which is 1 everywhere"),
        (("algo.old_log_probs=engine", "algo.correction.veto=0.1"), "which is 1 everywhere"),
        (("algo.correction.level=token", "algo.correction.low=3"), "`algo.correction.low` = 3 is above"),
        (("algo.correction.reject_level=token", "algo.correction.reject_low=3"), "is above `algo.correction.reject_hi"),
        (("algo.correction.mode=mask",), "`algo.correction.mode` has no effect with `algo.correction.level`"),
        (("algo.correction.normalize=true",), "`algo.correction.normalize` has no effect"),
        (("algo.correction.high=5",), "`algo.correction.high` has no effect"),
        (("algo.correction.reject_high=5",), "no effect with `algo.correction.reject_level` = 'none'"),
    ],
)
def test_each_contradiction_is_the_one_problem_told(overrides, expected):
    (problem,) = problems(*overrides)
    assert expected in problem


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_answer_per_prompt_is_refused_where_answers_are_compared(name):
    found = problems(f"algo.name={name}", "algo.aggregation=constant", "rollout.n_samples_per_prompt=1")
    assert bool(found) == (name in GROUP_RELATIVE)


@pytest.mark.parametrize(
    "overrides",
    [
        ("algo.correction.level=token", "algo.correction.high=0", "algo.correction.low=3"),
        ("algo.correction.level=sequence", "algo.correction.mode=mask", "algo.correction.high=4"),
        (
            "algo.correction.reject_level=geometric",
            "algo.correction.reject_low=0.99",
            "algo.correction.reject_high=1.01",
        ),
        ("algo.kl_coef=0.1", "algo.kl_place=reward", "algo.name=rloo"),
        ("algo.name=reinforce_plus_plus", "algo.gamma=0.9", "rollout.n_samples_per_prompt=1"),
        ("algo.name=mine.py:OWN", "algo.gamma=0.9", "algo.std_normalization=false"),
        ("algo.old_log_probs=engine", "algo.opsm_delta=1e-4", "algo.dual_clip=3"),
        ("algo.name=ppo", "algo.gamma=0.99", "algo.gae_lambda=0.95", "algo.critic_lr=1e-5", "algo.critic_warmup=5"),
        ("algo.name=ppo", "algo.critic_offload=true", "trainer.backend=megatron"),
    ],
)
def test_what_goes_together_is_let_through(overrides):
    assert problems(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("algo.name=gspo", "algo.aggregation=token"), "long answers count more"),
        (("algo.name=gspo",), "eps_clip = 3e-4"),
        (("algo.name=cispo",), "no lower bound"),
        (("rollout.custom_generate=a.py:f", "algo.correction.level=token"), "must return rollout_log_probs"),
    ],
)
def test_warnings(overrides, expected):
    found = algorithm_warnings(load_recipe("", overrides))
    assert [w for w in found if expected in w], found


def test_paper_settings_and_defaults_are_not_warned_about():
    assert algorithm_warnings(load_recipe()) == []
    assert (
        algorithm_warnings(load_recipe("", ("algo.name=gspo", "algo.eps_clip=3e-4", "algo.eps_clip_high=4e-4"))) == []
    )
    assert algorithm_warnings(load_recipe("", ("algo.name=cispo", "algo.eps_clip=1.0", "algo.eps_clip_high=4.0"))) == []


def test_an_own_algorithm_is_looked_for_without_running_it(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("raise SystemExit('imported')\nOWN = 1\n")
    assert list(check_names(load_recipe("", (f"algo.name={path}:OWN",)), None)) == []
    (problem,) = check_names(load_recipe("", (f"algo.name={path}:OWM",)), None)
    assert problem.startswith("`algo.name`") and "did you mean 'OWN'" in problem


def test_a_critic_takes_the_memory_of_a_second_model_in_training():
    spec = get_spec("qwen3-0.6b")
    plain, ppo = (
        {v.name: v.value for v in trainer_bytes(load_recipe("", (f"algo.name={name}",)), spec, on_gpu=False)}
        for name in ("grpo", "ppo")
    )
    assert ppo["critic"] == plain["weights"] + plain["gradients"] + plain["optimizer"]
    assert ppo["total"] == plain["total"] + ppo["critic"]
    options = ("checkpoint.keep=2", "sft.steps=1")
    plain, ppo = (
        {v.name: v.value for v in disk_bytes(load_recipe("", (f"algo.name={name}", *options)), spec)}
        for name in ("grpo", "ppo")
    )
    assert ppo["checkpoints"] == plain["checkpoints"] + 3 * 12 * spec.params and ppo["SFT stage"] == plain["SFT stage"]


def test_frozen_models_take_the_memory_of_their_weights(tmp_path):
    teacher = get_spec("qwen3-1.7b")
    (tmp_path / "config.json").write_text(json.dumps(teacher.to_config()))
    options = (f"distill.teacher={tmp_path}", "algo.old_log_probs=published")
    spec = get_spec("qwen3-0.6b")
    alone, here = (
        {v.name: v.value for v in trainer_bytes(load_recipe("", o), spec, on_gpu=False)} for o in ((), options)
    )
    assert here["teacher"] == 4 * teacher.params
    assert here["published weights"] == here["own weights"] == alone["weights"]
    groups = {v.name: v.group for v in trainer_bytes(load_recipe("", options), spec, on_gpu=True)}
    assert groups["published weights"].startswith("host") and not groups["teacher"].startswith("host")

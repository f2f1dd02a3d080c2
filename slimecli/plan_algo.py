"""What can be wrong with the algorithm's numbers taken together, and what about them deserves a look."""

from __future__ import annotations

from collections.abc import Iterator

from slimecli.plan_spec import frozen_problems
from slimecli.recipe import Recipe
from slimecli.recipe_algo import AlgoSection, CorrectionSection, DistillSection
from slimecli.rundir import RunDir
from slimecli.topology import MODEL

GROUP_RELATIVE = ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
"""algorithms that compare the answers to one prompt"""
_BY_STD = ("grpo", "gspo", "cispo")


def check_algorithm(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Values of [algo] that contradict each other, or that the algorithm does not look at."""
    algo = recipe.algo
    alone = recipe.steps and recipe.rollout.n_samples_per_prompt == 1
    if alone and algo.name in GROUP_RELATIVE and algo.rewards_normalization:
        yield (
            f"`rollout.n_samples_per_prompt` = 1: {algo.name} compares the answers of a group and needs at least 2; "
            "ppo and reinforce_plus_plus do without"
        )
    if algo.constant_length and algo.aggregation != "constant":
        yield f"`algo.constant_length` has no effect with `algo.aggregation` = {algo.aggregation!r}; use 'constant'"
    if algo.name == "dr_grpo" and algo.aggregation != "constant":
        yield (
            f"`algo.name` = 'dr_grpo' divides by a constant, and `algo.aggregation` = {algo.aggregation!r} by lengths: "
            "set it to 'constant', or use grpo with algo.std_normalization=false"
        )
    if 0 < algo.dual_clip <= 1:
        yield f"`algo.dual_clip` = {algo.dual_clip:g} would cut the loss of on-policy answers; set it above 1, or to 0"
    if recipe.steps and algo.name == "ppo" and algo.critic_warmup >= recipe.steps:
        yield f"`algo.critic_warmup` = {algo.critic_warmup} leaves none of the {recipe.steps} `steps` to the policy"
    may_have_critic = algo.name not in (*GROUP_RELATIVE, "reinforce_plus_plus", "sft")
    if may_have_critic and algo.critic_offload and recipe.trainer.backend != "megatron":
        yield (
            "`algo.critic_offload` is what `trainer.backend` = 'megatron' can do; fsdp's critic is always beside the "
            "policy, divided over `trainer.processes`"
        )
    yield from _check_kl(algo)
    yield from _check_idle(algo)
    yield from _check_correction(algo)


def _check_kl(algo: AlgoSection) -> Iterator[str]:
    if algo.kl_coef == 0 and (algo.kl_place != "loss" or algo.kl_unbiased):
        field = "kl_unbiased" if algo.kl_unbiased else "kl_place"
        yield f"`algo.{field}` has no effect with `algo.kl_coef` = 0"
    if algo.kl_in_reward and algo.kl_unbiased:
        yield "`algo.kl_unbiased` weights the KL of the loss, and `algo.kl_place` = 'reward'; use 'loss'"


def _check_idle(algo: AlgoSection) -> Iterator[str]:
    """Values that are set, and that the algorithm never reads."""
    if algo.name == "cispo" and algo.dual_clip:
        yield "`algo.dual_clip` has no effect with cispo, which clips the weight and not the loss"
    named = algo.name in (*GROUP_RELATIVE, "ppo", "reinforce_plus_plus", "sft")
    if named and algo.name not in ("ppo", "reinforce_plus_plus") and algo.gamma != 1:
        yield f"`algo.gamma` has no effect with {algo.name}; only ppo and reinforce_plus_plus discount"
    default = AlgoSection()
    for field in ("gae_lambda", "value_clip", "critic_lr", "critic_warmup", "critic_offload"):
        if named and algo.name != "ppo" and getattr(algo, field) != getattr(default, field):
            yield f"`algo.{field}` has no effect with {algo.name}, which has no critic; only ppo has one"
    if named and not algo.std_normalization and algo.name not in (*_BY_STD, "dr_grpo"):
        yield f"`algo.std_normalization` has no effect with {algo.name}"
    if named and not algo.rewards_normalization and algo.name in ("ppo", "rloo", "reinforce_plus_plus"):
        yield f"`algo.rewards_normalization` has no effect with {algo.name}"
    if algo.name == "sft" and (algo.uses_engine_log_probs or algo.old_log_probs != "recompute"):
        yield "`algo.correction`, `algo.opsm_delta` and `algo.old_log_probs` have no effect with sft"


def _check_correction(algo: AlgoSection) -> Iterator[str]:
    correction, default = algo.correction, CorrectionSection()
    corrects = correction.level != "none" or correction.reject_level != "none" or correction.veto > 0
    if algo.old_log_probs == "engine" and corrects:
        yield (
            "`algo.correction` weights by old policy / engine, which is 1 everywhere with `algo.old_log_probs` = "
            "'engine'; set that to 'recompute', or turn the correction off"
        )
    for prefix, level in (("", correction.level), ("reject_", correction.reject_level)):
        low, high = getattr(correction, f"{prefix}low"), getattr(correction, f"{prefix}high")
        if 0 < high < low:
            yield f"`algo.correction.{prefix}low` = {low:g} is above `algo.correction.{prefix}high` = {high:g}"
        names = [f"{prefix}low", f"{prefix}high", *(["mode", "normalize"] if not prefix else [])]
        idle = [n for n in names if getattr(correction, n) != getattr(default, n)]
        if level == "none" and idle:
            yield f"`algo.correction.{idle[0]}` has no effect with `algo.correction.{prefix}level` = 'none'"


def check_distillation(recipe: Recipe, run: RunDir | None) -> Iterator[str]:
    """Values of [distill] that contradict each other, or that nobody reads."""
    section, default = recipe.distill, DistillSection()
    if not section.is_on:
        for field in ("coef", "only"):
            if getattr(section, field) != getattr(default, field):
                yield f"`distill.{field}` has no effect without a teacher; set `distill.teacher` or `distill.url`"
        return
    if section.teacher and section.url:
        yield "`distill.teacher` and `distill.url` name two teachers; leave one of them empty"
    for problem in frozen_problems(section.teacher, has_weights=True) if section.teacher else ():
        yield f"`distill.teacher` = {section.teacher!r}: {problem}"
    if section.url and not section.url.startswith(("http://", "https://", MODEL)):
        yield (
            f"`distill.url` = {section.url!r} is no address; use e.g. http://127.0.0.1:30000, or model:NAME; "
            "a folder is for `distill.teacher` or `engine.models`"
        )
    if section.url and recipe.rollout.temperature != 1:
        yield (
            f"`distill.url`: a server tells log-probs at temperature 1, and `rollout.temperature` = "
            f"{recipe.rollout.temperature:g}; set that to 1, or use `distill.teacher`"
        )
    if section.coef == 0:
        yield "`distill.coef` = 0 asks a teacher and does not listen; set it above 0, or leave the teacher out"
    if recipe.algo.name == "sft":
        yield "[distill] judges sampled answers, and `algo.name` = 'sft' samples none"


def algorithm_warnings(recipe: Recipe) -> list[str]:
    """Numbers that are allowed, and seldom meant."""
    algo = recipe.algo
    found = []
    if algo.name == "gspo" and algo.aggregation == "token":
        found.append(
            "gspo has one ratio per answer: with algo.aggregation = 'token' long answers count more; paper: 'sample'"
        )
    if algo.name == "gspo" and min(algo.eps_clip, algo.eps_clip_high) > 0.05:
        found.append(
            f"gspo clips the length-normalised ratio of an answer, which hardly ever leaves 1 +- {algo.eps_clip:g}; "
            "its paper has algo.eps_clip = 3e-4 and algo.eps_clip_high = 4e-4"
        )
    if algo.name == "cispo" and algo.eps_clip < 1:
        found.append("cispo has no lower bound in its paper: algo.eps_clip = 1 or more; algo.eps_clip_high e.g. 4")
    if recipe.rollout.custom_generate and algo.uses_engine_log_probs:
        found.append("rollout.custom_generate must return rollout_log_probs: algo.correction and the like need them")
    if recipe.distill.only and recipe.rollout.dynamic_filter == "zero-variance":
        found.append(
            "rollout.dynamic_filter drops answers for their rewards, and distill.only does not look at rewards"
        )
    return found

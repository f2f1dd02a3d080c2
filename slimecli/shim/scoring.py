"""slime's reward helpers, made of slimecli's scorers. A missing label scores 0 here, as it does in slime."""

from __future__ import annotations

from typing import Any

from slimecli.data_tools.rewards import answers, load_reward, text
from slimecli.data_tools.rewards.extract import extract_boxed
from slimecli.data_tools.rewards.mathd import mathd_equal, sympy_equal
from slimecli.errors import DataError
from slimecli.rollout.args import HookArgs
from slimecli.types import Sample


async def async_rm(args: HookArgs, sample: Sample, **kwargs: Any) -> Any:
    """The score that the recipe's reward gives a sample."""
    return await _reward(args)(args, sample)


async def batched_async_rm(args: HookArgs, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """The scores of several."""
    reward = _reward(args)
    if args.group_rm:
        return list(await reward(args, samples))
    scores: list[Any] = await reward.each(args, samples)
    for score in scores:
        if isinstance(score, Exception):
            raise score
    return scores


def _reward(args: HookArgs) -> Any:
    kept = args._fixed
    if "reward" not in kept:
        kept["reward"] = load_reward(args.recipe.reward)
    return kept["reward"]


def _or_zero(score: Any, response: str, label: Any, metadata: dict[str, Any] | None = None) -> Any:
    try:
        return score(response, None if label is None else str(label), metadata or {})
    except DataError:
        return 0.0


def deepscaler(response: str, label: Any) -> int:
    """1 when the last box after the thinking equals the label."""
    return int(_or_zero(answers.deepscaler, response, label))


def dapo(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """DAPO's rule: {"score": 1 or -1, "acc", "pred"}.

    Args:
        strict_box_verify: the answer is the last box of the last 100 characters, and must equal the label as it is.
    """
    if strict_box_verify:
        pred = extract_boxed(solution_str[-100:])
        right = pred is not None and pred == str(ground_truth)
    else:
        pred = answers.dapo_answer(solution_str) or "[INVALID]"
        right = answers.dapo(solution_str, str(ground_truth), {})["score"] > 0
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """(F1, precision, recall) of words, as SQuAD counts them."""
    f1 = float(_or_zero(text.f1, prediction, ground_truth))
    given, wanted = text.words(prediction), text.words(ground_truth)
    common = f1 * (len(given) + len(wanted)) / 2
    return f1, common / max(len(given), 1), common / max(len(wanted), 1)


def gpqa(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 when the chosen letter is the right one."""
    return float(_or_zero(answers.gpqa, response, label, metadata))


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Equality by MATH's normalisation."""
    return mathd_equal(given_answer, ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Equality by PRM800K's rules."""
    return sympy_equal(given_answer, ground_truth)


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """Equality of the last box with the label, by either rule."""
    if not ground_truth:
        return False
    answer = extract_boxed(solution_str)
    wanted = (extract_boxed(ground_truth) if "\\boxed" in ground_truth else ground_truth) or ""
    return answer is not None and (mathd_equal(answer, wanted) or sympy_equal(answer, wanted))

"""On-policy distillation: the term by hand, on top of any estimator, and a teacher behind a server."""

import asyncio
import math

import pytest
import torch

from slimecli.algos import algorithm
from slimecli.algos.distillation import distilled, teacher_gap
from slimecli.batch import from_groups
from slimecli.errors import DataError, SlimeError
from slimecli.plan_algo import algorithm_warnings, check_distillation
from slimecli.recipe import load_recipe
from slimecli.recipe_algo import AlgoSection, DistillSection
from slimecli.rollout.teacher import Teacher
from slimecli.types import Sample, SampleStatus
from tests.models import tiny_model

SECTION = DistillSection(url="http://teacher", coef=0.5)


def sample(index, reward, teacher=(-0.5, -1.0, -2.0), mask=None):
    return Sample(
        group_index=0, index=index, tokens=[5, 6, 7, 8, 9], response_length=3, reward=reward, loss_mask=mask,
        rollout_log_probs=[-1.0, -1.0, -1.0], teacher_log_probs=teacher and list(teacher),
        status=SampleStatus.COMPLETED,
    )  # fmt: skip


def made(*samples):
    """A batch whose old log-probs are the engine's, with GRPO's advantages."""
    batch = from_groups([list(samples)], temperature=1.0)
    batch = batch.replace(old_log_probs=batch.rollout_log_probs)
    return batch.replace(advantages=algorithm("grpo").advantages(batch, AlgoSection()))


def test_the_term_by_hand():
    batch = made(sample(0, 1.0), sample(1, 0.0, mask=[1, 0, 1]))
    # log pi_old - log teacher = -1 - (-0.5, -1, -2) = (-0.5, 0, 1); the token of a tool has none
    gap = [0.0, -0.5, 0.0, 1.0, 0.0]
    assert teacher_gap(batch).tolist() == [*gap, *gap]
    r = (1 - 0.5) / (math.sqrt(0.5) + 1e-6)
    expected = [0, r + 0.25, r, r - 0.5, 0, 0, -r + 0.25, 0, -r - 0.5, 0]
    torch.testing.assert_close(distilled(batch, SECTION).advantages, torch.tensor(expected))


def test_only_leaves_rewards_out():
    found = distilled(made(sample(0, 1.0), sample(1, 0.0)), SECTION.model_copy(update={"only": True})).advantages
    assert found.tolist() == [0, 0.25, 0, -0.5, 0] * 2


def test_a_teacher_of_the_same_mind_changes_nothing():
    same = (-1.0, -1.0, -1.0)
    batch = made(sample(0, 1.0, same), sample(1, 0.0, same))
    assert torch.equal(distilled(batch, SECTION).advantages, batch.advantages)


def test_micro_batches_see_the_same_term():
    batch = made(sample(0, 1.0), sample(1, 0.0, (-3.0, -0.1, -0.2)))
    whole = distilled(batch, SECTION)
    parts = [distilled(batch.select([i]), SECTION).advantages for i in (0, 1)]
    assert torch.equal(torch.cat(parts), whole.advantages)


def test_samples_without_a_teacher_are_refused():
    with pytest.raises(DataError, match="sample 1 has no teacher_log_probs"):
        made(sample(0, 1.0), sample(1, 0.0, None))
    with pytest.raises(DataError, match="carry no teacher_log_probs"):
        distilled(made(sample(0, 1.0, None), sample(1, 0.0, None)), SECTION)
    with pytest.raises(SlimeError, match="needs old_log_probs"):
        teacher_gap(made(sample(0, 1.0)).replace(old_log_probs=None))


class Server:
    """Answers like SGLang: [log-prob, id, text] per prompt token, nothing known of the first."""

    def __init__(self, spoil=lambda told: told):
        self.spoil = spoil
        self.payloads = []

    async def generate(self, payload):
        self.payloads.append(payload)
        told = [[None if i == 0 else -i / 10, token, None] for i, token in enumerate(payload["input_ids"])]
        return {"meta_info": {"input_token_logprobs": self.spoil(told)}}

    async def close(self):
        pass


def judge(server, *samples):
    return asyncio.run(Teacher(server, 5.0).judge(samples))


def test_the_teacher_is_asked_for_the_whole_text_and_told_of_the_answer():
    server, one = Server(), sample(0, 1.0, None)
    assert judge(server, one) == [None]
    assert one.teacher_log_probs == [-0.2, -0.3, -0.4]
    (payload,) = server.payloads
    assert payload["input_ids"] == one.tokens and payload["logprob_start_len"] == 0
    assert payload["sampling_params"]["max_new_tokens"] == 0


def test_what_a_hook_said_already_is_not_asked_again():
    server, one = Server(), sample(0, 1.0)
    assert judge(server, one) == [None] and server.payloads == []
    assert one.teacher_log_probs == [-0.5, -1.0, -2.0]


@pytest.mark.parametrize("spoil", [lambda t: t[1:], lambda t: [], lambda t: [[x[0], 1, None] for x in t]])
def test_an_answer_about_other_tokens_is_an_error(spoil):
    one = sample(0, 1.0, None)
    (error,) = judge(Server(spoil), one)
    assert "or for others than the 5 it was sent" in error.what
    assert one.teacher_log_probs is None


def problems(*overrides):
    return list(check_distillation(load_recipe("", overrides), None))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("distill.coef=2",), "`distill.coef` has no effect without a teacher"),
        (("distill.only=true",), "`distill.only` has no effect without a teacher"),
        (("distill.teacher=/nowhere",), "there is no config.json"),
        (("distill.url=localhost:1",), "is no address"),
        (("distill.url=http://x", "rollout.temperature=0.7"), "at temperature 1, and `rollout.temperature` = 0.7"),
        (("distill.url=http://x", "distill.coef=0"), "does not listen"),
        (("distill.url=http://x", "algo.name=sft"), "'sft' samples none"),
    ],
)
def test_each_contradiction_is_the_one_problem_told(overrides, expected):
    (problem,) = problems(*overrides)
    assert expected in problem


def test_what_goes_together_is_let_through(tmp_path):
    tiny_model(tmp_path)
    assert problems("distill.url=http://x", "distill.coef=0.3") == []
    assert problems(f"distill.teacher={tmp_path}", "rollout.temperature=0.7") == []
    assert len(problems(f"distill.teacher={tmp_path}", "distill.url=http://x")) == 1
    idle = load_recipe("", ("distill.url=http://x", "distill.only=true", "rollout.dynamic_filter=zero-variance"))
    assert any("distill.only does not look at rewards" in w for w in algorithm_warnings(idle))

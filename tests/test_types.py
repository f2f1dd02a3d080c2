import pytest

from slimecli.errors import DataError
from slimecli.types import Sample, SampleStatus


def made(**changes):
    fields = {
        "tokens": [7, 8, 9, 10, 2],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.1, 0.0, -0.3],
        "reward": 1.0,
        "status": SampleStatus.COMPLETED,
    }
    return Sample(**(fields | changes))


def test_lengths_follow_from_the_tokens():
    sample = made()
    assert sample.prompt_length == 2
    assert sample.mask == [1, 0, 1]
    assert sample.effective_response_length == 2
    assert made(loss_mask=None).mask == [1, 1, 1]
    assert made(remove_sample=True).mask == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"response_length": 9}, "outside"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries"),
        ({"rollout_log_probs": [-0.1, float("nan"), 0.0]}, "NaN"),
        ({"rollout_log_probs": [0.5, 0.0, 0.0]}, "positive"),
        ({"reward": None}, "without a reward"),
    ],
)
def test_check_refuses_what_cannot_be_trained_on(changes, problem):
    made().check()
    with pytest.raises(DataError, match=problem):
        made(**changes).check()


def test_json_round_trip_keeps_every_value_and_refuses_unknown_ones():
    sample = made(metadata={"a": [1]}, weight_versions=["3"], group_index=0, index=0)
    data = sample.to_dict()
    assert data["group_index"] == 0
    assert "label" not in data
    assert Sample.from_dict(data) == sample
    with pytest.raises(DataError, match="colour"):
        Sample.from_dict({"colour": 1})


def test_a_named_score_is_picked_by_key():
    sample = made(reward={"format": 0.5, "answer": 1.0})
    assert sample.get_reward_value("answer") == 1.0
    with pytest.raises(DataError, match=r"reward\.key"):
        sample.get_reward_value("colour")
    with pytest.raises(DataError, match="no reward"):
        made(reward=None, status=SampleStatus.PENDING).get_reward_value()

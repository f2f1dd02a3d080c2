import types

import pytest

from slimecli.data_tools.filters import FilterResult, load_filter
from slimecli.errors import SlimeError, UsageError
from slimecli.types import Sample, SampleStatus


def group(*rewards):
    return [Sample(index=i, reward=r) for i, r in enumerate(rewards)]


@pytest.mark.parametrize("name", ["zero-variance", "check_reward_nonzero_std"])
def test_zero_variance(name):
    keep = load_filter(name)
    assert keep(None, group(0.0, 1.0, 1.0)) == FilterResult(True)
    assert keep(None, group(1.0, 1.0)) == FilterResult(False, "zero_std_1.0")
    assert keep(None, group(0.0, 1e-9)).keep is False
    assert keep(None, group(1.0)).keep is False


def test_an_answer_that_failed_has_no_say():
    failed = Sample(index=9, status=SampleStatus.FAILED)
    keep = load_filter("zero-variance")
    assert keep(None, [*group(0.0, 1.0), failed]).keep and not keep(None, [*group(1.0, 1.0), failed]).keep


def test_reward_key_and_fallback():
    args = types.SimpleNamespace(reward_key="score")
    mixed = group({"score": 0.0, "acc": 1.0}, {"score": 1.0, "acc": 1.0})
    assert load_filter("zero-variance")(args, mixed).keep
    verdict = load_filter("check_reward_nonzero_std_with_fallback")(None, group(0.5, 0.5))
    assert verdict == FilterResult(False, "zero_std_0.5", keep_when_insufficient=True)


def test_own_filter(tmp_path):
    file = tmp_path / "f.py"
    file.write_text(
        "class Out:\n    keep = False\n    reason = 'short'\n\n"
        "def yes(args, samples, **kw):\n    return True\n\ndef out(args, samples, **kw):\n    return Out()\n\n"
        "def none(args, samples, **kw):\n    return None\n"
    )
    assert load_filter(f"{file}:yes")(None, group(1.0)) == FilterResult(True)
    assert load_filter(f"{file}:out")(None, group(1.0)) == FilterResult(False, "short")
    with pytest.raises(SlimeError, match="returned None"):
        load_filter(f"{file}:none")(None, group(1.0))
    with pytest.raises(UsageError, match="did you mean 'zero-variance'"):
        load_filter("zero-varience")

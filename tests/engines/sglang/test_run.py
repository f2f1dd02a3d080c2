"""`slime run` with a real SGLang server: rollout, step, weights by broadcast, all from the command line."""

from functools import partial

import pytest

from tests.engines.sglang import made
from tests.forked import slime, succeed
from tests.tiny_run import metrics, sets

pytestmark = pytest.mark.sglang


def test_two_steps_with_weights_by_broadcast(sglang_python, tmp_path):
    engine = (
        "engine.backend=sglang",
        f"engine.python={sglang_python}",
        "sync.kind=distributed",
        "steps=2",
        *made.PATIENT,
    )
    words = ("run", "--recipe", "quickstart", "--run", "r", *sets(*engine), "--sglang-log-level", "warning")
    succeed(*words, folder=tmp_path, run=partial(slime, timeout_s=900))
    steps = metrics(tmp_path / "runs" / "r")
    assert [s["step"] for s in steps] == [1, 2]
    assert len({s["weights/fingerprint"] for s in steps}) == 2, "the weights change with every step"
    assert max(s["train/logprob_gap_max"] for s in steps) < 1e-5, "trainer and server compute the same"
    assert "INFO" not in (tmp_path / "runs" / "r" / "logs" / "engine.log").read_text(), "log-level came through"


def test_an_argument_of_another_name_is_told_before_anything_starts(sglang_python, tmp_path):
    words = ("plan", "--recipe", "quickstart", *sets("engine.backend=sglang", f"engine.python={sglang_python}"))
    outcome = slime(*words, "--sglang-mem-fraction-statik", "0.5", folder=tmp_path)
    assert outcome.code == 2
    assert "did you mean 'mem-fraction-static'" in outcome.err

"""SIGTERM under Ray, whose client library would turn it into a silent exit in mid-step."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_run import sets


@pytest.mark.ray
def test_sigterm_under_ray_ends_the_step_and_says_how_to_resume(tmp_path):
    words = ["run", "--recipe", "quickstart", "--run", "r", *sets("sft.steps=5000", "cluster.backend='ray'")]
    variables = {**os.environ, "SLIME_RUNS": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    with (tmp_path / "err").open("w") as err:
        child = subprocess.Popen(
            [sys.executable, "-c", "from slimecli.cli import main; main()", *words], env=variables, stderr=err
        )
        try:
            end = time.monotonic() + 90
            while not (tmp_path / "r/sft/metrics.jsonl").is_file():
                assert child.poll() is None and time.monotonic() < end, (tmp_path / "err").read_text()
                time.sleep(0.1)
            child.send_signal(signal.SIGTERM)
            code = child.wait(60)
        finally:
            child.kill()
    told = (tmp_path / "err").read_text()
    assert code == 130 and "slime run --resume" in told and "SIGTERM received" not in told, told
    assert json.loads((tmp_path / "r/error.json").read_text())["exit_code"] == 130
    assert list((tmp_path / "r/sft/checkpoints").glob("step_*"))

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from slimecli import console
from slimecli.observe.display import ROWS_SHOWN, Progress, StepClock, duration, step_text
from slimecli.recipe import validate_recipe
from slimecli.rundir import RunDir

METRICS = {"rollout/reward": 0.5, "rollout/accuracy": 0.25, "train/kl": 1e-3, "train/entropy": 0.7}
RUN, RECIPE = RunDir(Path("runs/demo")), validate_recipe({"title": "a title"})
PERF = {"seconds/step": 2.0, "tokens_per_s": 1234.0}


def test_plain_output_is_one_line_per_step_on_stderr(capsys):
    with _progress(["data", "loop"], live=False) as progress:
        progress.stage("loop", "running", "not done yet")
        progress.step(1, 4, METRICS, PERF, stage="loop")
        progress.message("engine 0 is ready")
        progress.stage("loop", "done", "2.0 s")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 5
    assert lines.pop(0) == "run runs/demo: a title"
    assert "\x1b" not in err
    assert lines[1].startswith("loop step 1/4  reward 0.500  accuracy 25.0%")
    assert "tokens/s 1,234" in lines[1]
    assert lines[1].endswith("eta 6.0 s")
    assert lines[3].endswith("loop  done  2.0 s")


def test_eta_follows_the_latest_steps_only():
    clock = StepClock()
    assert clock.remaining(5) is None
    for _ in range(30):
        clock.add(100.0)
    for _ in range(20):
        clock.add(1.0)
    clock.add(float("nan"))
    assert clock.remaining(7) == pytest.approx(7.0)


def test_live_display_keeps_the_last_rows_and_stage_list(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "_console", Console(file=screen, force_terminal=True, width=120, height=40))
    monkeypatch.setattr(sys, "stderr", screen)
    progress = _progress(["data", "loop"], live=True)
    progress.stage("data", "done", "0.1 s")
    progress.stage("loop", "running")
    for step in range(1, 31):
        progress.step(step, 50, METRICS, PERF)
    plain = Console(file=io.StringIO(), width=120)
    plain.print(progress.render())
    progress.close()
    progress.close()
    text = plain.file.getvalue()
    assert "✓  data  done  0.1 s" in text
    assert "▶  loop  running" in text
    assert "step 30 of 50, about 40 s left" in text
    steps = [line.split()[0] for line in text.splitlines() if line.strip()[:2].isdigit()]
    assert steps == [str(s) for s in range(31 - ROWS_SHOWN, 31)]
    assert "\x1b" in screen.getvalue()


def test_a_step_without_metrics_is_no_news(capsys):
    _progress(live=False).step(0, 5, {}, PERF)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_columns_without_a_value_are_left_out():
    text = step_text(3, 9, {"train/loss": 1.25, "rollout/response_length": 12.0})
    assert text == "step 3/9  loss 1.2500  length 12.0"


def test_a_new_stage_starts_a_new_table_and_clock():
    progress = _progress(live=False)
    progress.stage("sft", "running")
    progress.step(1, 2, {"train/loss": 2.0}, {"seconds/step": 50.0})
    progress.stage("sft", "done")
    progress.stage("loop", "running")
    assert "step 1" not in _render(progress)
    progress.step(1, 3, METRICS, PERF)
    assert "about 4.0 s left" in _render(progress)


def _progress(stages=(), live=None):
    return Progress(RUN, RECIPE, stages, live=live)


def _render(progress):
    plain = Console(file=io.StringIO(), width=120)
    plain.print(progress.render())
    return plain.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (42.4, "42 s"), (185, "3m05s"), (7800, "2h10m"), (59.9, "60 s")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text

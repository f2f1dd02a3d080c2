"""A small finished run, written through the same classes a real one uses."""

from pathlib import Path

from slimecli import files
from slimecli.recipe import validate_recipe
from slimecli.rundir import RunDir, create_run


def make_run(root: Path, steps: int = 4) -> RunDir:
    recipe = validate_recipe({"title": "made for tests", "steps": steps, "seed": 7})
    run = create_run(str(root), recipe, 'title = "made for tests"\n')
    for step in range(1, steps + 1):
        run.append(
            run.metrics_path,
            {
                "step": step,
                "rollout/reward": 0.2 + 0.1 * step,
                "rollout/accuracy": 0.1 * step,
                "rollout/response_length": 10.0 + step,
                "train/loss": 1.0 / step,
                "train/kl": 1e-4 * step,
                "train/entropy": 1.0 - 0.1 * step,
                "train/logprob_gap": 1e-6,
                "weights/fingerprint": f"f{step}",
            },
        )
        run.append(
            run.perf_path,
            {"step": step, "seconds/collect": 1.0, "seconds/learn": 2.0, "seconds/step": 3.0, "tokens_per_s": 500.0},
        )
    for step, mean in ((0, 0.2), (steps, 0.9)):
        sample = {"prompt": "1+1=", "response": f"<{step}> & done", "label": "2", "reward": mean, "status": "completed"}
        scores = {"mean": mean, "stderr": 0.01, "n": 8, "samples": [sample]}
        files.write_json(
            run.eval_path(step), {"step": step, "sets": {"holdout": {"sampled": scores, "greedy": scores}}}
        )
    for stage, seconds in (("data", 1.5), ("loop", 12.0)):
        files.write_json(
            run.stage_path(stage),
            {"stage": stage, "status": "done", "seconds": seconds, "fingerprint": "ab", "outputs": {}, "host": "here"},
        )
    return run

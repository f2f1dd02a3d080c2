"""Does every estimator learn? Held-out accuracy from one SFT start to a stated goal, on three seeds.

python -m benchmarks.learning [--only NAME ...] [--seeds N] [--workdir DIR] [--save]

The task is the quickstart's: two-digit addition, 512 held-out sums. Per seed there is one SFT start; every setting goes
on from its weights for the same number of steps of the same size, on the CPU, in one process. Results are kept per
setting and seed in the work folder: a second call goes on where the first one stopped.
"""

from __future__ import annotations

import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _common
from slimecli import env, files

GOAL = 0.875
"""sampled held-out accuracy at the end of the budget that counts as learnt"""
STEPS = 100
"""the budget: rollout steps of 32 prompts x 8 answers"""

DR_GRPO = ("algo.name=dr_grpo", "algo.aggregation=constant")
STALE = (1, 2, 3, 4)
"""versions that answers lie behind"""
CLIPPED = ("algo.old_log_probs=engine",)
"""no correction: PPO's ratio and clipping, with the weights that spoke as the old policy"""
CORRECTED = ("algo.correction.level=token", "algo.correction.high=2")
"""truncated importance weights: the decoupled objective with a bound"""

SETTINGS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "grpo without std": ("algo.std_normalization=false",),
    "dr_grpo": DR_GRPO,
    "gspo": ("algo.name=gspo", "algo.eps_clip=3e-4", "algo.eps_clip_high=4e-4"),
    "cispo": ("algo.name=cispo", "algo.eps_clip=1", "algo.eps_clip_high=4"),
    "rloo": ("algo.name=rloo",),
    "reinforce_plus_plus": ("algo.name=reinforce_plus_plus",),
    "reinforce_plus_plus_baseline": ("algo.name=reinforce_plus_plus_baseline",),
    "ppo": ("algo.name=ppo", "algo.critic_lr=3e-3", "algo.critic_warmup=5", "algo.whiten_advantages=true"),
    "distillation from grpo's end": ("distill.teacher={grpo}", "distill.only=true"),
    **{f"grpo, {s} old": (f"rollout.max_staleness={s}",) for s in STALE},
    **{f"grpo, {s} old, clipped": (f"rollout.max_staleness={s}", *CLIPPED) for s in STALE},
    **{f"dr_grpo, {s} old, clipped": (*DR_GRPO, f"rollout.max_staleness={s}", *CLIPPED) for s in STALE},
    **{f"grpo, {s} old, corrected": (f"rollout.max_staleness={s}", *CORRECTED) for s in STALE},
    "grpo, never stopping, corrected": ("rollout.max_staleness=2", "rollout.fully_async=true", *CORRECTED),
}
"""name in the table -> what it changes in the recipe; {grpo}: the weights that the setting `grpo` ended with"""


def run_slime(folder: Path, sets: Sequence[str]) -> float:
    """One whole `slime run` in one process; returns its CPU seconds. What it says is kept beside the run."""
    words = ["run", "--recipe", "quickstart", "--run", str(folder), "--overwrite"]
    for item in ("cluster.backend=local", *sets):
        words += ["--set", item]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "slimecli", *words]
        done = subprocess.run(command, stdout=out, stderr=out, env=env.child_env(NO_COLOR="1"), check=False)
    if done.returncode:
        raise SystemExit(f"slime {' '.join(words)} ended with {done.returncode}: see {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start_of(workdir: Path, seed: int, sizes: Sequence[str]) -> Path:
    """HF folder of the SFT start of a seed, made once."""
    folder = workdir / f"start_{seed}"
    if not (folder / "export").is_dir():
        run_slime(folder, (f"seed={seed}", "steps=0", *sizes))
    return folder / "export"


def curve_of(folder: Path) -> dict[str, float]:
    """Step -> sampled held-out accuracy of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {str(x["step"]): x["eval/holdout/sampled"] for x in lines if "eval/holdout/sampled" in x}


def measure(workdir: Path, name: str, seed: int, steps: int, sizes: Sequence[str]) -> dict[str, Any]:
    """One setting on one seed, or what an earlier call found."""
    folder = workdir / f"{re.sub('[^a-z0-9]+', '_', name)}_{seed}"
    kept = folder.with_suffix(".json")
    if kept.is_file():
        found: dict[str, Any] = files.read_json(kept)
        return found
    start = start_of(workdir, seed, sizes)
    model = ("model.name=", "model.source=path", f"model.path={start}", "model.tokenizer_vocab=0", "sft.steps=0")
    common = (f"seed={seed}", f"steps={steps}", f"eval.interval={max(1, steps // 10)}", "eval.greedy=false")
    teacher = workdir / f"grpo_{seed}" / "export"
    cpu = run_slime(folder, (*sizes, *model, *common, *(s.format(grpo=teacher) for s in SETTINGS[name])))
    found = {"curve": curve_of(folder), "cpu_s": cpu}
    files.write_json(kept, found)
    return found


def summarise(name: str, found: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """A line of the table: means over the seeds, and every seed's end."""
    ends = [f["curve"][str(steps)] for f in found]
    # a kept curve has its keys as sorted text: "100" stands before "20"
    reached = [min((int(k) for k, v in f["curve"].items() if v >= GOAL), default=None) for f in found]
    return {
        "setting": name,
        "start": statistics.mean(f["curve"]["0"] for f in found),
        "end": statistics.mean(ends),
        "worst end": min(ends),
        "ends": ends,
        "step of the goal": reached,
        "cpu_s": statistics.mean(f["cpu_s"] for f in found),
        "learnt": min(ends) >= GOAL,
    }


def main() -> None:
    """Every setting on every seed."""
    flags_of = _common.parser("learning curves of every estimator", repeats=1)
    flags_of.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), help="settings to run")
    flags_of.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    flags_of.add_argument("--workdir", type=Path, default=None, help="keeps runs and results; empty: a temporary one")
    flags = flags_of.parse_args()
    steps, sizes = (6, ("sft.steps=20", "data.count=64", "data.holdout=16")) if flags.smoke else (STEPS, ())
    seeds, names = (1, ["grpo", "ppo"]) if flags.smoke else (flags.seeds, flags.only)
    with tempfile.TemporaryDirectory() as scratch:
        workdir = flags.workdir or Path(scratch)
        workdir.mkdir(parents=True, exist_ok=True)
        rows = []
        for name in names:
            found = [measure(workdir, name, seed, steps, sizes) for seed in range(seeds)]
            rows.append(summarise(name, found, steps))
            _common.say(f"{name}: {rows[-1]['start']:.3f} -> {rows[-1]['end']:.3f}")
    table = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in rows]
    _common.show(f"held-out accuracy, sampled, {seeds} seed(s), {steps} steps; goal {GOAL}", table)
    # errors before against errors after, of the first setting
    ratio = (1 - rows[0]["start"]) / max(1 - rows[0]["end"], 1e-3)
    result = {"goal": GOAL, "steps": steps, "seeds": seeds, "settings": rows, "ratio": ratio}
    _common.finish("learning", result, save=flags.save)


if __name__ == "__main__":
    main()

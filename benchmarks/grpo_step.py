"""Seconds per GRPO step: the whole product (`slime run`) against TRL's GRPOTrainer.

    python -m benchmarks.grpo_step --trl-python /path/to/venv-with-trl/bin/python [--steps 25] [--repeats 3]

Both train the same SFT start model (made by `slime run --until sft`) on the same prompts with the same batch, group,
learning rate and token budget. Both run as programs of their own, one after the other, interleaved; both append a line
per step to a file, which this script watches to read the CPU time of the whole process tree. A step is everything from
the end of the step before to its own end: generation, reward, loss, optimizer, weight sync, records.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import _common
from slimecli import env, files
from slimecli.recipe import Recipe
from slimecli.rundir import RunDir

WARM_UP = 5
"""steps before the clock counts: allocators, thread pools and Python's caches fill"""
SLIME = [sys.executable, "-c", "from slimecli.cli import main; main()"]


@dataclass(kw_only=True)
class Side:
    """One competitor: how it is started, and what its runs took."""

    command: list[str]
    threads: int
    perf: Path
    seconds: list[float] = field(default_factory=list)
    """per step, all runs, warm-up left out"""
    cpu_seconds: list[float] = field(default_factory=list)
    """per step, one mean per run"""
    per_run: list[float] = field(default_factory=list)
    """median seconds per step of each run"""


def start_run(scratch: Path, overrides: Sequence[str]) -> tuple[RunDir, Recipe]:
    """Data, model and SFT of the quickstart, done by the product; a copy of this folder is where each run starts."""
    from slimecli.rundir import open_run

    root = scratch / "start"
    sets = [part for text in overrides for part in ("--set", text)]
    command = [*SLIME, "run", "--recipe", "quickstart", "--run", str(root), "--until", "sft", *sets]
    if not (root / "run.json").is_file():
        launch(command, scratch / "start.log")
    run = open_run(str(root))
    return run, run.recipe()


def launch(command: list[str], log: Path) -> None:
    """Run a program to its end; show the end of its output if it fails."""
    with log.open("w") as handle:
        code = subprocess.run(
            command, stdout=handle, stderr=handle, env=child_environment(1), cwd=log.parent, check=False
        ).returncode
    check_exit(code, command, log)


def child_environment(threads: int) -> dict[str, str]:
    """Threads and quiet libraries for either side."""
    return env.child_env(
        PYTHONPATH=str(_common.ROOT), OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1", NO_COLOR="1",
        TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip


def check_exit(code: int, command: list[str], log: Path) -> None:
    """Stop the benchmark when a program failed."""
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise SystemExit(f"{' '.join(command[:6])} ... ended with {code}:\n{tail}")


def write_prompts(run: RunDir, recipe: Recipe, path: Path) -> None:
    """The training prompts as the model sees them, for TRL: rendered text and label."""
    from slimecli.session import Session

    with Session(run, recipe) as session:
        samples = session.prompts(str(run.data_dir / "train.jsonl"))
    lines = [json.dumps({"prompt": s.prompt, "label": s.label}) for s in samples]
    files.write_text(path, "\n".join(lines) + "\n")


def run_side(side: Side, log: Path) -> list[dict[str, Any]]:
    """One run: start it, watch its step file, keep the figures. Returns the records of the steps that count.

    The warm-up does not count, nor does the last step, which makes slime's checkpoint.
    """
    side.perf.unlink(missing_ok=True)
    cpu_at: dict[int, float] = {}
    with log.open("w") as handle:
        process = subprocess.Popen(
            side.command, stdout=handle, stderr=handle, env=child_environment(side.threads), cwd=log.parent
        )
        try:
            while process.poll() is None:
                done = side.perf.read_bytes().count(b"\n") if side.perf.is_file() else 0
                if done and done not in cpu_at:
                    cpu_at[done] = _common.tree_cpu_seconds(process.pid)
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    check_exit(process.returncode, side.command, log)
    lines = [json.loads(line) for line in side.perf.read_text().splitlines()]
    warm = min(WARM_UP, len(lines) // 2)
    records = lines[warm:-1] or lines[warm:]
    side.seconds += [r["seconds/step"] for r in records]
    side.per_run.append(statistics.median(r["seconds/step"] for r in records))
    seen = [n for n in sorted(cpu_at) if warm <= n < len(lines)]
    if len(seen) > 1:
        side.cpu_seconds.append((cpu_at[seen[-1]] - cpu_at[seen[0]]) / (seen[-1] - seen[0]))
    return records


def slime_side(name: str, start: RunDir, scratch: Path, overrides: Sequence[str]) -> Side:
    """`slime run` from the SFT stage on."""
    root = scratch / name
    sets = [part for text in overrides for part in ("--set", text)]
    command = [*SLIME, "run", "--resume", "--run", str(root), "--until", "loop", *sets]
    return Side(command=command, threads=1, perf=RunDir(root).perf_path)


def trl_side(flags: Any, recipe: Recipe, start: Path, threads: int, scratch: Path) -> Side:
    """TRL in its own environment, with the recipe's numbers."""
    script = Path(__file__).with_name("trl_grpo.py")
    perf = scratch / f"trl_{threads}.jsonl"
    values = {
        "model": start, "prompts-file": scratch / "prompts.jsonl", "perf": perf, "threads": threads,
        "steps": flags.steps, "prompts": recipe.rollout.batch_size, "group": recipe.rollout.n_samples_per_prompt,
        "max-new-tokens": recipe.rollout.max_response_tokens, "lr": recipe.trainer.lr, "seed": recipe.seed,
    }  # fmt: skip
    options = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    return Side(command=[flags.trl_python, str(script), *options], threads=threads, perf=perf)


def measure(flags: Any, scratch: Path) -> dict[str, Any]:
    """Prepare, run the sides in turns, compare."""
    from slimecli.session import start_weights

    common = [f"steps={flags.steps}", "eval.interval=0", f"checkpoint.interval={flags.steps}"]
    small = ["sft.steps=2", "sft.warmup_steps=0", "trainer.warmup_steps=0", "data.count=64", "data.holdout=8"]
    small += ["rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "trainer.global_batch_size=16"]
    small += ["cluster.backend=local"]
    overrides = [*common, *flags.set, *(small if flags.smoke else [])]
    _common.say("start model: data, tokenizer and SFT of the quickstart")
    run, recipe = start_run(scratch, overrides)
    sides = {"slime": slime_side("slime", run, scratch, [])}
    if not flags.smoke:
        sides["slime, 2 engines"] = slime_side("slime_2", run, scratch, ["engine.replicas=2"])
    if flags.trl_python and not flags.smoke:
        write_prompts(run, recipe, scratch / "prompts.jsonl")
        start = start_weights(run, recipe)
        trl = {f"TRL, threads={n}": trl_side(flags, recipe, start, n, scratch) for n in (1, 2)}
        sides = {**trl, **sides}
    lengths: dict[str, list[float]] = {name: [] for name in sides}
    rewards: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(flags.repeats):
        for name, side in sides.items():
            ours = name.startswith("slime")
            root = side.perf.parent
            if ours:
                shutil.rmtree(root, ignore_errors=True)
                shutil.copytree(run.root, root, symlinks=True)
            records = run_side(side, scratch / "log.txt")
            if ours:
                stored = [json.loads(line) for line in RunDir(root).metrics_path.read_text().splitlines()]
                records = [r for r in stored if "rollout/reward" in r][-len(records) :]
            prefix = "rollout/" if ours else ""
            lengths[name].append(statistics.mean(r[f"{prefix}response_length"] for r in records))
            rewards[name].append(statistics.mean(r[f"{prefix}reward"] for r in records))
            _common.say(f"  round {number + 1}, {name}: {side.per_run[-1]:.3f} s per step")
    return summarise(sides, lengths, rewards) | {"start": f"SFT, {recipe.sft.steps} steps", "steps": flags.steps}


def summarise(
    sides: dict[str, Side], lengths: dict[str, list[float]], rewards: dict[str, list[float]]
) -> dict[str, Any]:
    """Medians, and ratios against the quicker of TRL's thread counts."""
    rows = {
        name: {
            "seconds_per_step": statistics.median(side.seconds),
            "cpu_seconds_per_step": statistics.median(side.cpu_seconds) if side.cpu_seconds else None,
            "fastest_run": min(side.per_run),
            "spread": _common.spread(side.per_run),
            "response_length": statistics.mean(lengths[name]),
            "reward": statistics.mean(rewards[name]),
        }
        for name, side in sides.items()
    }
    _common.show("GRPO step, 256 answers", [{"side": name, **values} for name, values in rows.items()])
    theirs = [row for name, row in rows.items() if name.startswith("TRL")]
    result: dict[str, Any] = {"sides": rows, "compared": bool(theirs), "ratio": None}
    if theirs:
        best = min(theirs, key=lambda row: row["seconds_per_step"])
        thrifty = min(row["cpu_seconds_per_step"] for row in theirs)
        result |= {
            "against": "TRL GRPOTrainer, its quicker thread count",
            "ratio": best["seconds_per_step"] / rows["slime"]["seconds_per_step"],
            "ratio_cpu": thrifty / rows["slime"]["cpu_seconds_per_step"],
            "ratio_2_engines": best["seconds_per_step"] / rows["slime, 2 engines"]["seconds_per_step"],
        }
        _common.say(f"\nslime is {result['ratio']:.2f}x TRL by the clock, {result['ratio_cpu']:.2f}x in CPU time")
    return result


def main() -> None:
    """Measure both halves, or in smoke mode slime's alone."""
    flags_of = _common.parser("GRPO step of the whole product against TRL's GRPOTrainer", repeats=3)
    flags_of.add_argument("--trl-python", default="", help="Python of an environment with TRL; empty: slime alone")
    flags_of.add_argument("--steps", type=int, default=25)
    flags_of.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="recipe override for slime")
    flags_of.add_argument("--keep", type=Path, help="work here; a start model found here is used")
    flags = flags_of.parse_args()
    if flags.smoke:
        flags.steps, flags.repeats = 3, 1
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (flags.keep or Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        result = measure(flags, scratch)
    _common.finish("grpo_step", result, save=flags.save)


if __name__ == "__main__":
    main()

"""Every ```console block of README runs, in order, in one folder; the quickstart is made small for it."""

import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slimecli import plan
from slimecli.cli import COMMANDS, build_app
from slimecli.flags import expanded, megatron_overrides
from slimecli.plan_gpus import GPU_MEMORY
from slimecli.plan_machine import this_machine
from slimecli.recipe import Recipe, load_recipe, shipped_recipes
from tests.engines.sglang import made
from tests.tiny_run import TINY

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = [x for x in TINY if not x.startswith("cluster.")] + ["steps=2"]
"""overrides for every line that makes a run from the quickstart; the main run stays on Ray, as in the README"""


OWN = "slime run --recipe grpo --model ./my-model --set data.train=questions.jsonl --run mine"
OWN_SMALL = (
    "steps=1",
    "data.holdout=4",
    "data.max_prompt_tokens=40",
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_response_tokens=8",
    "rollout.dynamic_filter=",
    "trainer.global_batch_size=16",
    "trainer.warmup_steps=0",
    "cluster.backend='local'",
)
"""an untrained model's answers are all wrong, so groups without a difference must be kept"""


def console_lines() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def shrunk(line: str, port: int) -> str:
    """The line with small numbers: fewer steps for new runs, as many more for a resumed one."""
    line = line.replace("8000", str(port)).replace("steps=200", "steps=3")
    if line.startswith("slime run --recipe quickstart"):
        on_ray = "--run quickstart" in line or "trainer.processes" in line
        small = SMALL if on_ray else [*SMALL, "cluster.backend='local'"]
        words, separator, megatron = line.partition(" -- ")
        line = f"{words} " + " ".join(f"--set {shlex.quote(x)}" for x in small) + separator + megatron
    return line


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """A folder with `slime` on the PATH."""
    folder = tmp_path_factory.mktemp("readme")
    program = folder / "bin" / "slime"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom slimecli.cli import main\nmain()\n")
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env.pop("SLIME_RUNS", None)
    return folder, env


@pytest.mark.ray
@pytest.mark.timeout(2400)
def test_every_console_line_works_in_order(shell):
    folder, env = shell
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = console_lines()
    assert len(lines) > 15
    background = []
    try:
        for line in lines:
            command = shrunk(line, port)
            if command.endswith("&"):
                words = shlex.split(command.removesuffix("&"))
                background.append(subprocess.Popen(words, cwd=folder, env=env, stderr=subprocess.DEVNULL))
                continue
            done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    finally:
        for process in background:
            process.terminate()
            process.wait(timeout=30)
    run_own_model(folder, env)
    runs = folder / "runs"
    assert (folder / "exported" / "config.json").is_file()
    assert "<svg" in (folder / "report.html").read_text()
    assert len((runs / "quickstart" / "metrics.jsonl").read_text().splitlines()) >= 3
    assert (runs / "single" / "rollouts" / "step_000002.jsonl.zst").is_file()


def run_own_model(folder: Path, env: dict[str, str]) -> None:
    """The line about an own model and own data, with the exported model in the place of the user's."""
    assert OWN in TEXT
    (folder / "my-model").symlink_to("exported")
    rows = [{"prompt": f"{i + 10} + {i} =", "label": str(2 * i + 10)} for i in range(24)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    command = [*shlex.split(OWN), *(word for item in OWN_SMALL for word in ("--set", item))]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (folder / "runs" / "mine" / "export" / "config.json").is_file()


def test_every_line_of_a_shell_block_parses():
    import typer

    group = typer.main.get_command(build_app())
    lines = [
        line
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for block in re.findall(r"```(?:sh)?\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("slime ")
    ]
    assert len(lines) > 5
    for line in lines:
        words = expanded(shlex.split(line.partition(" > ")[0].partition(" < ")[0], comments=True))
        group.commands[words[1]].make_context(words[1], words[2:])


def eight_gpus() -> tuple[str, list[str]]:
    """(lines for a recipe, words of the command) of the section about eight GPUs."""
    section = TEXT.partition("## Eight GPUs")[2].partition("\n## ")[0]
    (lines,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    (command,) = re.findall(r"^slime plan .*?(?=```)", section, re.DOTALL | re.MULTILINE)
    return lines, expanded(shlex.split(command.replace("\\\n", " ")))


def test_the_lines_for_eight_gpus_say_what_the_command_does(tmp_path):
    lines, words = eight_gpus()
    split = words.index("--")
    sets = [words[i + 1] for i, word in enumerate(words[:split]) if word == "--set"]
    command = load_recipe("gsm8k", (*sets, *megatron_overrides(words[split + 1 :])), words[words.index("--model") + 1])
    recipe = tomllib.loads(shipped_recipes()["gsm8k"].read_text())
    for name, table in tomllib.loads(lines).items():
        recipe[name] = recipe.get(name, {}) | table
    written = Recipe.model_validate(recipe)
    spelt = {"sglang": {"mem_fraction_static": 0.7}}
    assert written == command.model_copy(update=spelt)
    assert command.sglang == {"mem-fraction-static": 0.7}


def test_eight_gpus_are_enough_for_it(monkeypatch, tmp_path):
    """The machine is made up; the numbers are what the README says."""
    _, words = eight_gpus()
    split = words.index("--")
    sets = [words[i + 1] for i, word in enumerate(words[:split]) if word == "--set"]
    python = made.installation(tmp_path, sys.executable)
    sets = [f"engine.python='{python}'" if x.startswith("engine.python") else x for x in sets]
    machine = dataclasses.replace(
        this_machine(tmp_path), gpus=8, gpu_memory_bytes=80 * 10**9, disk_free_bytes=10**13, shared_memory_bytes=10**11
    )
    monkeypatch.setattr(plan, "this_machine", lambda folder: machine)
    found = plan.make_plan(load_recipe("gsm8k", (*sets, *megatron_overrides(words[split + 1 :])), "qwen3-8b"))
    assert [x for x in found.warnings if "deterministic" not in x] == []
    held = max(int(v.value) for v in found.values if v.group == GPU_MEMORY)
    assert f"({held / 1e9:.0f} GB at most)" in TEXT
    assert f"({int(found.value('disk', 'total')) / 1e9:.0f} GB:" in TEXT
    apart = ("trainer.processes=4", "engine.replicas=4", "rollout.max_staleness=1", "cluster.placement=disaggregated")
    assert all(f"`{x}`" in TEXT for x in apart)
    parts = plan.make_plan(load_recipe("gsm8k", (*sets, *megatron_overrides(words[split + 1 :]), *apart), "qwen3-8b"))
    assert parts.value("placement", "GPUs") == 8


def test_the_two_commands_are_the_ones_of_ci():
    first = re.search(r"```sh\n(.*?)```", TEXT, re.DOTALL)[1]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == [
        "python3 bootstrap.py run",
        "python3 bootstrap.py test",
    ]
    assert "python3 bootstrap.py test --venv" in (ROOT / ".ci" / "run").read_text()


def test_the_table_of_commands_is_complete_and_its_examples_parse():
    import typer

    rows = re.findall(r"^\| `([a-z-]+)` \| .+ \| `(slime .+)` \|$", TEXT, re.MULTILINE)
    assert [name for name, _ in rows] == list(COMMANDS)
    group = typer.main.get_command(build_app())
    for name, example in rows:
        words = shlex.split(example)
        assert words[:2] == ["slime", name]
        group.commands[name].make_context(name, words[2:])


def test_every_link_into_the_repository_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert len(pages) >= 5
    for page in pages:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_documented_metrics_and_fields_exist():
    from slimecli.recipe import recipe_fields, section_names

    known = {name for name, _, _ in recipe_fields()}
    sections = "|".join(section_names())
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(rf"[`\s]((?:{sections})\.[a-z_0-9]+)[`\s=,]", text):
            assert name in known or name.endswith((".jsonl", ".toml", ".json")), f"{page.name}: {name}"

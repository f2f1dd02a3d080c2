"""docs/from-slime.md: its table of flags is what hooks go by, and its recipe is one. After a change that is meant:

python -m tests.test_docs_from_slime
"""

import dataclasses
import re
import sys
from pathlib import Path

from slimecli import plan
from slimecli.plan_machine import this_machine
from slimecli.recipe import load_recipe, recipe_fields
from slimecli.rollout.args import FLAGS
from tests.engines.sglang import made

PAGE = Path(__file__).parents[1] / "docs" / "from-slime.md"
IN_WORDS = ("hf_checkpoint", "rewards_normalization", "grpo_std_normalization")
"""names of `args` that are more than one field, or the opposite of a flag"""
SETTABLE = {"max_context": "engine.max_context"}
"""what follows from several fields -> the field that says it"""


def flags():
    yield "| THUDM/slime | here |"
    yield "|---|---|"
    for name, field in FLAGS.items():
        if name not in IN_WORDS:
            yield f"| `--{name.replace('_', '-')}` | `{SETTABLE.get(field, field)}` |"


def page():
    """The page with its table as it must be."""
    table = "\n".join(flags())
    return re.sub(
        r"(<!-- table: flags -->\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}{table}\n{m[2]}",
        PAGE.read_text(encoding="utf-8"),
        flags=re.S,
    )


def test_the_table_of_flags_is_that_of_the_code():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.test_docs_from_slime"


def test_every_named_field_is_one():
    known = {name for name, _, _ in recipe_fields()} | {"seed", "steps"}
    fields = re.findall(r"^\| `--[a-z-]+` \| `([a-z_.]+)` \|$", page(), re.M)
    assert len(fields) > 50 and set(fields) <= known


def test_the_recipe_is_planned_without_a_complaint(monkeypatch, tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", page(), re.S)
    (tmp_path / "qwen3-4b.toml").write_text(block)
    for name in ("dapo-math-17k", "aime-2024"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{i}", "label": "{i}"}}\n' for i in range(64)))
    monkeypatch.chdir(tmp_path)
    machine = dataclasses.replace(
        this_machine(tmp_path), gpus=8, gpu_memory_bytes=80 * 2**30, disk_free_bytes=10**13, shared_memory_bytes=10**11
    )
    monkeypatch.setattr(plan, "this_machine", lambda folder: machine)
    python = made.installation(tmp_path, sys.executable)
    found = plan.make_plan(load_recipe("qwen3-4b.toml", (f"engine.python='{python}'",)))
    assert found.value("placement", "GPUs") == 8
    assert not [x for x in found.warnings if "deterministic" not in x], found.warnings


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

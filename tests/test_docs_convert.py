"""docs/convert.md: what it shows works, and its tables name what there is."""

import json
import re
import shlex
import tomllib
from pathlib import Path

from slimecli.cli import run
from slimecli.model_specs import config, families
from tests.models import tiny_model

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "convert.md").read_text(encoding="utf-8")


def test_commands_work_and_write_what_the_tables_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model(tmp_path / "my-model")
    (block,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines():
        assert run(shlex.split(line)[1:]) == 0
    made = tmp_path / "my-model-megatron"
    written = {p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file()}
    for name in {n if n.startswith(("hf/", "release/")) else n.split("/")[0] for n in written}:
        assert f"`{name.removeprefix('release/')}`" in TEXT or f"`{name}`" in TEXT or name.startswith("hf/")
    certificate = json.loads((made / "certificate.json").read_text())
    (weight,) = {tuple(sorted(row)) for row in certificate["weights"].values()}
    for field in (*certificate, *certificate["logprob_check"], *weight):
        assert f"`{field}`" in TEXT, field
    assert (tmp_path / "my-model-again" / "model.safetensors").is_file()


def test_the_example_entry_is_a_model():
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    file = tomllib.loads((Path(config.__file__).parent / "qwen3.toml").read_text())
    family = families()["qwen3"]
    ((name, numbers),) = tomllib.loads(example)["models"].items()
    spec = config.build(name, family, config.merge(family.traits, file.get("defaults", {}), numbers))
    assert spec.check(spec.to_config()) == [] and 1.5e9 < spec.params < 2.5e9

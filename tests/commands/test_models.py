import json
import subprocess
import sys

import pytest

from slimecli.cli import run
from slimecli.commands.models import COLUMNS, describe, list_models, row, show_model
from slimecli.errors import UsageError
from slimecli.model_specs import registry
from tests.models import FAMILIES, tiny_config, tiny_model


def test_list_is_complete_and_filters():
    assert {s.name for s in list_models()} == set(registry())
    names = [s.name for s in list_models("QWEN3")]
    assert "qwen3-4b" in names and "qwen2.5-7b" not in names
    assert list_models("zebra") == []


def test_show_by_name_repository_and_folder(tmp_path):
    assert show_model("Qwen/Qwen3-4B").name == "qwen3-4b"
    spec = show_model(str(tiny_model(tmp_path / "mine")))
    assert (spec.name, spec.layers) == ("mine", 3)
    with pytest.raises(UsageError, match="did you mean"):
        show_model("qwen3-4")


def test_command_line(capsys):
    assert run(["models", "show", "qwen3-4b", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["params"] == 4_022_468_096 and data["kv_bytes_per_token"] == 147_456
    assert data["megatron_args"]["num-query-groups"] == 8
    assert run(["models", "--filter", "llama3.2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("name\tfamily") and len(lines) == 4
    assert run(["models", "llama3.2"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert run(["models", "show"]) == 2 and run(["models", "shwo", "qwen3-4b"]) == 2
    assert run(["models", "--filter", "zebra"]) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_any_family_needs_no_entry(family, tmp_path):
    tiny_config(family).save_pretrained(tmp_path)
    spec = show_model(str(tmp_path))
    assert spec.name == tmp_path.name and spec.hidden == 64
    assert {line["what"] for line in describe(spec)} >= {"parameters", "KV cache", "Megatron arguments"}


def test_row_and_description_say_what_is_special():
    glm5, hybrid = registry()["glm-5.2"], registry()["qwen3.5-35b-a3b"]
    assert list(row(glm5)) == COLUMNS
    assert (row(glm5)["params"], row(glm5)["active"], row(glm5)["kv"]) == ("743B", "41.3B", "latent")
    assert (row(hybrid)["experts"], row(registry()["kimi-k2-instruct"])["params"]) == ("256/8", "1.03T")
    said = {line["what"]: str(line["value"]) for line in describe(glm5)}
    assert said["experts"] == "256 of width 2048, 8 per token" and "top 2048" in said["indexer"]
    assert said["prediction layers"] == "1, with 9,952,920,320 parameters more"
    said = {line["what"]: str(line["value"]) for line in describe(hybrid)}
    assert said["shared expert"] == "width 512, gated" and said["hidden / ffn"] == "2048 / experts only"
    assert said["gated delta"].startswith("all but each 4th layer: 16 key and 32 value heads")
    assert said["state of gated delta"].startswith("64,389,120 bytes per sequence")
    assert "from 4 of 8 groups" in str(describe(registry()["deepseek-v3"]))


def test_the_list_needs_no_torch():
    code = (
        "import sys, time; from slimecli.cli import run; start = time.process_time(); code = run(['models', '--json']);"
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules, time.process_time() - start < 1,"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.split() == ["0", "False", "False", "True"]
    assert len(json.loads(done.stdout)) == len(registry())


def test_a_folder_may_be_named_by_its_config_and_must_have_one(tmp_path, capsys):
    tiny_config("qwen3").save_pretrained(tmp_path)
    assert show_model(str(tmp_path / "config.json")).hidden == 64
    (tmp_path / "empty").mkdir()
    assert run(["models", "show", str(tmp_path / "empty")]) == 4
    assert "has no config.json" in capsys.readouterr().err
    assert run(["models", "show"]) == 2
    assert "`slime models show` is not understood" in capsys.readouterr().err

import json

import pytest

from slimecli.cli import run
from slimecli.commands.models import list_models, show_model
from slimecli.errors import UsageError
from slimecli.model_specs import registry
from tests.models import tiny_model


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
    assert run(["models", "show"]) == 2
    assert run(["models", "--filter", "zebra"]) == 2

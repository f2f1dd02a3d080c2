"""A run may start from a quantised model: what it trains is the model that the weights stand for."""

import pytest
import torch

from slimecli import files
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run
from slimecli.weights.export import export_weights
from slimecli.weights.hf import HfFolder
from slimecli.weights.origin import hf_origin
from slimecli.weights.quant import open_weights
from slimecli.weights.source import materialise_model
from tests.models import tiny_model


@pytest.mark.parametrize("trusted", [False, True])
def test_a_run_dequantises_its_model(trusted, tmp_path, runs_root):
    model = tiny_model(tmp_path / "m")
    export_weights(hf_origin(model), tmp_path / "q", quantize="fp8", card=lambda notes: "")
    (tmp_path / "q" / "modeling_own.py").write_text("")
    words = (f"model.path='{tmp_path / 'q'}'", "model.source='path'", f"model.trust_remote_code={str(trusted).lower()}")
    run = create_run("r", load_recipe("", words))
    folder = materialise_model(run.recipe(), run)
    assert files.is_committed(folder) and type(open_weights(folder)) is HfFolder
    expected = open_weights(tmp_path / "q")
    assert HfFolder(folder).shapes == expected.shapes
    assert all(torch.equal(HfFolder(folder).read(n), t) for n, t in expected.iterate())
    assert (folder / "tokenizer.json").is_file() and (folder / "modeling_own.py").exists() is trusted

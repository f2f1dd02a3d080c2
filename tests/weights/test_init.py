import json

import pytest
import torch

from slimecli import files
from slimecli.errors import DataError
from slimecli.model_specs import from_config, get_spec
from slimecli.weights.check import check_folder
from slimecli.weights.hf import HfFolder
from slimecli.weights.init import init_model
from tests.models import FAMILIES, OWN_CODE, as_on_the_hub, edit_json, tiny_config, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_loads_in_transformers_as_it_was_drawn(family, tmp_path):
    from transformers import AutoModelForCausalLM

    spec = from_config(tiny_config(family).to_dict(), name="tiny")
    init_model(spec, tmp_path / "m", seed=3, std=0.5)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    weights = dict(model.named_parameters())
    assert sum(p.numel() for p in weights.values()) == spec.params
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        else:
            assert tensor.std().item() == pytest.approx(0.5, rel=0.1), name
    assert model.config.rope_parameters["rope_theta"] == 10000.0


def test_seed_decides_every_byte(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        init_model("qwen3-tiny", tmp_path / name, seed=seed)
    assert files.sha256(tmp_path / "a") == files.sha256(tmp_path / "b")
    a, c = HfFolder(tmp_path / "a"), HfFolder(tmp_path / "c")
    same = [n for n in a.names if torch.equal(a.read(n), c.read(n))]
    assert all(n.endswith("norm.weight") for n in same)


def test_tokenizer_sets_vocabulary_and_end_token(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tok", vocab=280)
    init_model("quickstart", tmp_path / "m", tokenizer_dir=tmp_path / "tok", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id and config["pad_token_id"] == tokenizer.pad_token_id
    assert (tmp_path / "m" / "tokenizer.json").is_file()
    folder = HfFolder(tmp_path / "m")
    assert folder.shapes["model.embed_tokens.weight"] == (len(tokenizer), 64)
    assert set(folder.dtypes.values()) == {torch.bfloat16}
    assert get_spec("quickstart").check(config) == [f"vocab: spec 300, config {len(tokenizer)}"]


def test_too_few_rows_are_refused(tmp_path):
    tiny_tokenizer(tmp_path / "tok", vocab=280)
    with pytest.raises(DataError, match="embedding rows"):
        init_model("quickstart", tmp_path / "m", tokenizer_dir=tmp_path / "tok", vocab_size=100)
    with pytest.raises(DataError, match="no tokenizer.json"):
        init_model("quickstart", tmp_path / "m", tokenizer_dir=tmp_path)


_ROUTER = "block_sparse_moe.gate.weight"
"""MiniMax has its routers in float32"""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_complete_and_computes(family, tmp_path):
    """As the hub has it, prediction layers included; transformers takes all but those and finds nothing lacking."""
    from transformers import AutoModelForCausalLM

    like = as_on_the_hub(tiny_model(tmp_path / "like", family), family)
    spec = from_config(json.loads((like / "config.json").read_text()), name="tiny")
    manifest = init_model(spec, tmp_path / "m", seed=1, std=0.3, dtype=torch.bfloat16)
    found = check_folder(tmp_path / "m")
    assert found.mtp == spec.mtp and spec.check(json.loads((tmp_path / "m" / "config.json").read_text())) == []
    folder = HfFolder(tmp_path / "m")
    assert manifest["tensors"] == len(folder.names) and manifest["dtype"] == "bfloat16"
    kept = {n for n in folder.names if folder.dtypes[n] == torch.float32}
    names = ("correction_bias", "A_log", "dt_bias", "linear_attn.norm.weight", "weights_proj.weight")
    names += (_ROUTER,) if family == "minimax_m2" else ()
    assert kept == {n for n in folder.names if n.endswith(names)}
    if family in OWN_CODE:
        edit_json(tmp_path / "m" / "config.json", model_type=FAMILIES[family][0])
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    logits = model(torch.arange(5, 17)[None]).logits
    assert logits.isfinite().all() and 0.5 < logits.float().std() < 10


def test_special_values(tmp_path):
    """Norms that are stored less one begin at 0, the gated norm at 1; decay rates differ from head to head."""
    from_hub = as_on_the_hub(tiny_model(tmp_path / "like", "qwen3_next"), "qwen3_next")
    init_model(from_config(json.loads((from_hub / "config.json").read_text()), name="tiny"), tmp_path / "m")
    folder, layer = HfFolder(tmp_path / "m"), "model.layers.0."
    assert not folder.read(f"{layer}input_layernorm.weight").any()
    assert (folder.read(f"{layer}linear_attn.norm.weight") == 1).all()
    assert (folder.read(f"{layer}linear_attn.dt_bias") == 1).all()
    assert folder.read(f"{layer}linear_attn.A_log").exp().tolist() == pytest.approx([4, 8, 12, 16])

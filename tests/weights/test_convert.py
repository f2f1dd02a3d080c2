import io
import json
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import metadata as dcp_meta
from torch.distributed.checkpoint.filesystem import _StorageInfo

from slimecli import files
from slimecli.errors import DataError
from slimecli.model_specs import from_config, get_spec
from slimecli.weights import direct, torch_dist_write
from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf
from slimecli.weights.hf import HfFolder
from slimecli.weights.maps import hf_shapes, rules_of
from slimecli.weights.torch_dist import TorchDist
from tests.models import tiny_config, tiny_model

FAMILIES = ["qwen3", "qwen2", "llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_byte_identical(family, tmp_path):
    hf = tiny_model(tmp_path / "hf", family, dtype="bfloat16")
    notes = hf_to_torch_dist(hf, tmp_path / "td")
    assert notes["verified"] and files.is_committed(tmp_path / "td")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back")
    before, after = HfFolder(hf), HfFolder(tmp_path / "back")
    assert before.names == after.names
    for name in before.names:
        assert before.dtypes[name] == after.dtypes[name]
        assert torch.equal(before.read(name).view(torch.uint8), after.read(name).view(torch.uint8)), name
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    certificate = json.loads((tmp_path / "td" / "certificate.json").read_text())
    assert certificate["weights"] == json.loads((tmp_path / "back" / "certificate.json").read_text())["weights"]
    assert set(certificate["weights"]) == set(before.names)


@pytest.mark.parametrize("family", FAMILIES)
def test_map_covers_the_model_exactly(family, tmp_path):
    hf = tiny_model(tmp_path / "hf", family)
    spec = from_config(tiny_config(family).to_dict())
    assert hf_shapes(spec) == HfFolder(hf).shapes
    names = [n for rule in rules_of(spec) for n in rule.hf]
    assert len(names) == len(set(names))


def test_fused_rows_lie_per_kv_group(tmp_path):
    hf = tiny_model(tmp_path / "hf", "qwen2")
    hf_to_torch_dist(hf, tmp_path / "td")
    w = load_file(hf / "model.safetensors")
    td, p = TorchDist(tmp_path / "td"), "model.layers.1.self_attn."
    for kind in ("weight", "bias"):
        rows = []
        for g in range(2):
            rows += [w[f"{p}q_proj.{kind}"][g * 32 : (g + 1) * 32]]
            rows += [w[f"{p}{x}_proj.{kind}"][g * 16 : (g + 1) * 16] for x in "kv"]
        key = f"decoder.layers.1.self_attention.linear_qkv.{kind}"
        assert torch.equal(td.read(key, (0,) * w[f"{p}q_proj.{kind}"].dim(), td.shape(key)), torch.cat(rows))
    fc1 = td.read("decoder.layers.2.mlp.linear_fc1.weight", (0, 0), (384, 64))
    gate, up = (w[f"model.layers.2.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(fc1, torch.cat([gate, up]))


def test_vocabulary_is_padded_with_zeros_and_cut_again(tmp_path):
    hf = tiny_model(tmp_path / "hf", "llama", vocab=290)
    hf_to_torch_dist(hf, tmp_path / "td")
    td = TorchDist(tmp_path / "td")
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert td.shape(key) == (384, 64)
        assert not td.read(key, (290, 0), (94, 64)).any()
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back")
    assert HfFolder(tmp_path / "back").shapes["lm_head.weight"] == (290, 64)


def test_layout_is_what_megatron_reads(tmp_path):
    hf = tiny_model(tmp_path / "hf")
    hf_to_torch_dist(hf, tmp_path / "td")
    release = tmp_path / "td" / "release"
    assert (tmp_path / "td" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((release / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    common = torch.load(release / "common.pt", weights_only=False)
    assert common["content_metadata"]["non_homogeneous_layers"] is True
    assert common["args"].num_query_groups == 2 and common["args"].padded_vocab_size == 384
    wanted = {"decoder.layers.0.self_attention.linear_qkv.weight": torch.empty(128, 64)}
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(release), no_dist=True)
    td = TorchDist(tmp_path / "td")
    key = next(iter(wanted))
    assert torch.equal(wanted[key], td.read(key, (0, 0), (128, 64)))
    for layer in range(3):
        for module_name in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        ):
            assert f"decoder.layers.{layer}.{module_name}._extra_state/shard_0_1" in td.entries


def written_by_torch(folder, chunks):
    """A checkpoint as torch.distributed.checkpoint writes it: torch.save after torch.save.

    Args:
        chunks: key -> [(offset, chunk)].
    """
    folder.mkdir(parents=True)
    storage, entries = {}, {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for key, parts in chunks.items():
            ends = [[o + n for o, n in zip(offset, part.shape, strict=True)] for offset, part in parts]
            full = torch.Size(max(column) for column in zip(*ends, strict=True))
            meta = dcp_meta.TensorStorageMetadata(dcp_meta.TensorProperties(parts[0][1].dtype), full, [])
            entries[key] = meta
            for offset, part in parts:
                start = file.tell()
                torch.save(part.clone(), file)
                meta.chunks.append(dcp_meta.ChunkStorageMetadata(torch.Size(offset), part.shape))
                index = dcp_meta.MetadataIndex(key, torch.Size(offset))
                storage[index] = _StorageInfo("__0_0.distcp", start, file.tell() - start)
    (folder / ".metadata").write_bytes(pickle.dumps(dcp_meta.Metadata(entries, storage_data=storage)))


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_checkpoint_in_other_chunks_converts_back(tmp_path, axis):
    """What Megatron writes for a homogeneous model: layers stacked, and chunks as the parallel layout had them."""
    hf = tiny_model(tmp_path / "hf")
    hf_to_torch_dist(hf, tmp_path / "td")
    td, chunks = TorchDist(tmp_path / "td"), {}
    for key, shape in td.tensors.items():
        if ".layers." not in key:
            chunks[key] = [((0,) * len(shape), td.read(key, (0,) * len(shape), shape))]
        elif ".layers.0." in key:
            parts = chunks[key.replace(".layers.0.", ".layers.")] = []
            for layer in range(3):
                full = td.read(key.replace(".0.", f".{layer}."), (0,) * len(shape), shape)[None]
                along = 1 + min(axis, len(shape) - 1)
                half = full.shape[along] // 2
                for start in (half, 0):
                    offset = [layer, *(0 for _ in shape)]
                    offset[along] = start
                    parts.append((tuple(offset), full.narrow(along, start, half)))
    chunks["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = [((0,), torch.ones(64))]
    written_by_torch(tmp_path / "stacked" / "iter_0000007", chunks)
    (tmp_path / "stacked" / "latest_checkpointed_iteration.txt").write_text("7")
    torch_dist_to_hf(tmp_path / "stacked", tmp_path / "back", like=hf)
    before, after = HfFolder(hf), HfFolder(tmp_path / "back")
    assert all(torch.equal(before.read(n), after.read(n)) for n in before.names)


def changed(hf, change):
    weights = load_file(hf / "model.safetensors")
    change(weights)
    save_file(weights, hf / "model.safetensors", {"format": "pt"})


def _nan(w):
    w["model.layers.0.mlp.up_proj.weight"][1, 1] = float("nan")


def _transposed(w):
    w["model.layers.0.mlp.up_proj.weight"] = w["model.layers.0.mlp.up_proj.weight"].t().contiguous()


FAULTS = {
    "missing model.norm.weight": lambda w: w.pop("model.norm.weight"),
    "model.strange": lambda w: w.update({"model.strange": torch.zeros(1)}),
    r"up_proj.weight has shape \[64, 192\] \(transposed\), expected \[192, 64\]": _transposed,
    r"up_proj.weight holds 1 NaN": _nan,
    "lm_head.weight differs": lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}),
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_wrong_source_is_named_and_leaves_nothing(said, tmp_path):
    hf = tiny_model(tmp_path / "hf")
    changed(hf, FAULTS[said])
    with pytest.raises(DataError, match=said):
        hf_to_torch_dist(hf, tmp_path / "td")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_redundant_tied_head_is_fine(tmp_path):
    hf = tiny_model(tmp_path / "hf")
    changed(hf, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    hf_to_torch_dist(hf, tmp_path / "td")
    assert "output_layer.weight" not in TorchDist(tmp_path / "td").tensors


def test_a_wrong_name_is_refused(tmp_path):
    hf = tiny_model(tmp_path / "hf")
    with pytest.raises(DataError, match=r"is not qwen3-0.6b: layers: spec 28, config 3.*vocab"):
        hf_to_torch_dist(hf, tmp_path / "td", expected=get_spec("qwen3-0.6b"))


def test_verification_sees_a_wrong_result(tmp_path, monkeypatch):
    """A bit that changes between memory and disk."""
    hf = tiny_model(tmp_path / "hf")
    real = direct.DiskFile.write

    def wrong(self, offset, data):
        if len(data) > 60_000:
            data[60_000] ^= 1
        real(self, offset, data)

    monkeypatch.setattr(direct.DiskFile, "write", wrong)
    with pytest.raises(DataError, match=r"verification: model\.embed_tokens\.weight was written as"):
        hf_to_torch_dist(hf, tmp_path / "td")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    assert not hf_to_torch_dist(hf, tmp_path / "td", verify=False)["verified"]


def test_verification_sees_a_wrong_place(tmp_path, monkeypatch):
    """Every byte is written as meant, but the metadata names the wrong layer."""
    real = torch_dist_write.TorchDistPlan._place

    def swapped(self, index, size):
        name = index.fqn.replace(".1.", ".X.").replace(".2.", ".1.").replace(".X.", ".2.")
        real(self, dcp_meta.MetadataIndex(name, index.offset), size)

    monkeypatch.setattr(torch_dist_write.TorchDistPlan, "_place", swapped)
    with pytest.raises(DataError, match=r"verification: model\.layers\.1\.\S+ was written as"):
        hf_to_torch_dist(tiny_model(tmp_path / "hf"), tmp_path / "td")


def test_metadata_that_runs_code_is_refused(tmp_path):
    hf_to_torch_dist(tiny_model(tmp_path / "hf"), tmp_path / "td")

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    (tmp_path / "td" / "release" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match="run code"):
        TorchDist(tmp_path / "td")
    assert not (tmp_path / "owned").exists()


def test_damaged_checkpoints_are_named(tmp_path):
    hf_to_torch_dist(tiny_model(tmp_path / "hf"), tmp_path / "td")
    data = tmp_path / "td" / "release" / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"__0_0\.distcp is missing or truncated"):
        TorchDist(tmp_path / "td")
    data.write_bytes(b"\0" * len(whole))
    with pytest.raises(DataError, match="is damaged"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    (tmp_path / "td" / "release" / ".metadata").write_bytes(pickle.dumps(io.StringIO)[:-3])
    with pytest.raises(DataError):
        TorchDist(tmp_path / "td")
    with pytest.raises(DataError, match="no torch_dist checkpoint"):
        TorchDist(tmp_path / "hf")


def test_another_models_config_is_refused(tmp_path):
    hf_to_torch_dist(tiny_model(tmp_path / "hf"), tmp_path / "td")
    other = tiny_model(tmp_path / "other", num_hidden_layers=4)
    with pytest.raises(DataError, match=r"missing decoder\.layers\.3"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", like=other)
    fewer = tiny_model(tmp_path / "fewer", num_hidden_layers=2)
    with pytest.raises(DataError, match=r"unknown decoder\.layers\.2"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", like=fewer)

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimecli import files
from slimecli.errors import DataError
from slimecli.weights import hf as module
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import INDEX, HfFolder, save_hf_folder
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def sharded(model, out, size=60_000):
    save_hf_folder(HfFolder(model).iterate(), out, like=model, max_shard_bytes=size)
    return out


def test_reads_what_safetensors_wrote(model):
    folder, truth = HfFolder(model), load_file(model / "model.safetensors")
    assert folder.names == sorted(truth)
    assert folder.shapes == {n: tuple(t.shape) for n, t in truth.items()}
    assert all(torch.equal(t, truth[n]) for n, t in folder.iterate())
    assert folder.nbytes == sum(t.nbytes for t in truth.values())


def test_shards_and_index_load_in_transformers(model, tmp_path):
    from transformers import AutoModelForCausalLM

    out = sharded(model, tmp_path / "out")
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 3 and all(s.stat().st_size < 90_000 for s in shards)
    assert all(s.name.endswith(f"-of-{len(shards):05d}.safetensors") for s in shards)
    assert fingerprint(HfFolder(out).iterate()) == fingerprint(HfFolder(model).iterate())
    assert all(load_file(s).keys() for s in shards)
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in HfFolder(model).iterate())


def test_large_shards_are_written_without_being_held(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HELD_BYTES", 10_000)
    monkeypatch.setattr(module, "HEADER_ROOM", 1500)
    out = sharded(model, tmp_path / "out", size=10**9)
    assert len(list(out.glob("*.safetensors"))) > 1, "a header that does not fit closes its shard"
    assert fingerprint(HfFolder(out).iterate()) == fingerprint(HfFolder(model).iterate())
    assert load_file(next(iter(out.glob("*.safetensors"))))


def test_equal_input_gives_equal_bytes(model, tmp_path):
    a, b = sharded(model, tmp_path / "a"), sharded(model, tmp_path / "b")
    assert files.sha256(a) == files.sha256(b)


def test_cast_is_noted_in_the_config(model, tmp_path):
    notes = save_hf_folder(HfFolder(model).iterate(), tmp_path / "o", like=model, dtype=torch.bfloat16)
    folder = HfFolder(tmp_path / "o")
    assert set(folder.dtypes.values()) == {torch.bfloat16}
    assert folder.config()["torch_dtype"] == notes["dtype"] == "bfloat16"
    assert notes["fingerprint"] == fingerprint(folder.iterate())


def test_only_known_companions_are_copied(model, tmp_path):
    source = tiny_model(tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"x")
    (source / "optimizer.pt").write_bytes(b"x")
    save_hf_folder(iter([("a", torch.zeros(2))]), tmp_path / "o", like=source)
    names = {p.name for p in (tmp_path / "o").iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names
    assert not {"pytorch_model.bin", "optimizer.pt"} & names
    assert HfFolder(tmp_path / "o").names == ["a"]


def test_a_tensor_changed_after_it_was_given_is_written_as_it_was(tmp_path, model):
    buffer = torch.zeros(4)

    def weights():
        for i in range(3):
            buffer.fill_(i)
            yield f"w{i}", buffer

    save_hf_folder(weights(), tmp_path / "o", like=model)
    assert [HfFolder(tmp_path / "o").read(f"w{i}")[0].item() for i in range(3)] == [0, 1, 2]


def test_damage_is_named(model, tmp_path):
    def broken(change):
        out = sharded(model, tmp_path / "d")
        change(out, sorted(out.glob("*.safetensors")))
        with pytest.raises(DataError) as caught:
            HfFolder(out)
        for path in sorted(out.iterdir()):
            path.unlink()
        return caught.value.what

    def truncate(out, shards):
        shards[1].write_bytes(shards[1].read_bytes()[:-10])

    def cut_header(out, shards):
        shards[1].write_bytes(struct.pack("<Q", 10**6) + b"{}")

    def garbage(out, shards):
        shards[1].write_bytes(struct.pack("<Q", 4) + b"nope")

    def lose(out, shards):
        shards[2].unlink()

    def unlist(out, shards):
        index = json.loads((out / INDEX).read_text())
        index["weight_map"].pop("model.norm.weight")
        (out / INDEX).write_text(json.dumps(index))

    def promise(out, shards):
        index = json.loads((out / INDEX).read_text())
        index["weight_map"]["model.ghost"] = shards[0].name
        (out / INDEX).write_text(json.dumps(index))

    assert "00002" in broken(truncate) and "bytes" in broken(truncate)
    assert "truncated" in broken(cut_header)
    assert "damaged safetensors header" in broken(garbage)
    assert "missing shard(s) model-00003" in broken(lose)
    assert "not in the index: model.norm.weight" in broken(unlist)
    assert "not in its shard: model.ghost" in broken(promise)


def test_duplicates_and_pickles_are_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "y.safetensors")
    with pytest.raises(DataError, match=r"tensor a is in both x\.safetensors and y\.safetensors"):
        HfFolder(tmp_path)
    only = tmp_path / "only"
    only.mkdir()
    (only / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(DataError, match="pickled weights are not read"):
        HfFolder(only)


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}'])
def test_an_index_without_names_is_told(index, model, tmp_path):
    out = sharded(model, tmp_path / "d")
    (out / INDEX).write_text(index)
    with pytest.raises(DataError, match="has no `weight_map` of tensor and file names"):
        HfFolder(out)


def test_a_header_or_config_of_another_kind_is_told(model, tmp_path):
    out = sharded(model, tmp_path / "d")
    (out / "config.json").write_text("[1]")
    with pytest.raises(DataError, match=r"config\.json is no JSON object"):
        HfFolder(out).config()
    first = min(out.glob("*.safetensors"))
    first.write_bytes(struct.pack("<Q", 3) + b"[1]")
    with pytest.raises(DataError, match="damaged safetensors header"):
        HfFolder(out)

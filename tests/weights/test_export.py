"""Every kind of origin becomes an HF folder that is compared with it; faults are caught; nothing half done stays."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from slimecli import files
from slimecli.errors import DataError, InterruptedRunError, UsageError
from slimecli.weights import export as module
from slimecli.weights.convert import hf_to_torch_dist
from slimecli.weights.export import export_weights, is_export, parse_bytes
from slimecli.weights.hf import HfFolder, save_hf_folder
from slimecli.weights.origin import find_origin, hf_origin
from slimecli.weights.quant import open_weights
from slimecli.weights.quant_fp8 import error_share
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def export(source, out, **options):
    return export_weights(hf_origin(source), out, card=lambda notes: f"# {notes['tensors']}\n", **options)


def equal(a, b, kind=torch.float32):
    left, right = open_weights(a), open_weights(b)
    assert left.names == right.names
    for name in left.names:
        assert torch.equal(left.read(name).to(kind), right.read(name)), name


def leftovers(folder):
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_a_folder_is_exported_in_shards_and_generates_the_same(model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "o"
    notes = export(model, out, max_shard_bytes=100_000)
    assert is_export(out) and notes["shards"] > 2 and not leftovers(tmp_path)
    equal(model, out)
    names = {p.name for p in out.iterdir()}
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"}
    assert wanted | {"certificate.json", files.DONE, "model.safetensors.index.json"} <= names
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    told = {}
    for folder in (model, out):
        network = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            written = network.generate(ids, max_new_tokens=8, do_sample=False)
            told[folder] = written, network(written).logits
    assert torch.equal(told[model][0], told[out][0]) and torch.equal(told[model][1], told[out][1])


def test_the_certificate_names_every_tensor(model, tmp_path):
    export(model, tmp_path / "o", dtype="bfloat16", quantize="fp8")
    certificate = files.read_json(tmp_path / "o" / "certificate.json")
    source, rows = HfFolder(model), certificate["weights"]
    assert certificate["verified"] is True and certificate["quantized"] == "fp8" and certificate["slime"]
    assert {n: tuple(r["shape"]) for n, r in rows.items()} == source.shapes
    assert rows["model.norm.weight"]["dtype"] == "bfloat16" and "error" not in rows["model.norm.weight"]
    quantised = [r for r in rows.values() if r["dtype"] == "float8_e4m3fn"]
    assert len(quantised) == 21 and all(0 < r["error"] <= 1 for r in quantised)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_dtype_is_cast_and_stated(kind, model, tmp_path):
    export(model, tmp_path / "o", dtype=kind)
    dtype = getattr(torch, kind)
    folder = HfFolder(tmp_path / "o")
    assert set(folder.dtypes.values()) == {dtype} and folder.config()["torch_dtype"] == kind
    for name, tensor in HfFolder(model).iterate():
        assert torch.equal(folder.read(name), tensor.to(dtype))


def test_what_routers_add_is_not_cast(tmp_path):
    source = tiny_model(tmp_path / "m", "glm4_moe")
    export(source, tmp_path / "o", dtype="bfloat16")
    dtypes = HfFolder(tmp_path / "o").dtypes
    kept = {n for n, kind in dtypes.items() if kind == torch.float32}
    assert kept and all(n.endswith("e_score_correction_bias") for n in kept)


@pytest.mark.parametrize("quantize", ["fp8", "fp8-ue8m0"])
def test_fp8_and_back(quantize, model, tmp_path):
    notes = export(model, tmp_path / "q", quantize=quantize, max_shard_bytes=60_000)
    assert notes["quantized"] == quantize and notes["shards"] > 1
    stated = files.read_json(tmp_path / "q" / "config.json")["quantization_config"]
    assert ("scale_fmt" in stated) == (quantize != "fp8")
    config = HfFolder(tmp_path / "q").config()
    assert (config["torch_dtype"], config.get("dtype")) == ("bfloat16", None), "the source says float32"
    export(tmp_path / "q", tmp_path / "back")
    plain = HfFolder(tmp_path / "back")
    assert "quantization_config" not in plain.config()
    assert dict(plain.shapes) == HfFolder(model).shapes
    for name, tensor in open_weights(tmp_path / "q").iterate():
        assert torch.equal(plain.read(name), tensor)
    shares = [error_share(t, plain.read(n), power_of_two=True) for n, t in HfFolder(model).iterate() if t.ndim > 1]
    assert max(shares) <= 1


def test_a_torch_dist_checkpoint_is_an_origin(model, tmp_path):
    hf_to_torch_dist(model, tmp_path / "t")
    origin = find_origin(tmp_path / "t")
    assert origin.kind == "torch_dist checkpoint"
    export_weights(origin, tmp_path / "o", card=lambda notes: "")
    equal(model, tmp_path / "o")
    export_weights(origin, tmp_path / "q", quantize="fp8", card=lambda notes: "")
    assert open_weights(tmp_path / "q").names == HfFolder(model).names


def test_a_torch_dist_checkpoint_without_a_config_says_what_to_do(model, tmp_path):
    import shutil

    hf_to_torch_dist(model, tmp_path / "t")
    shutil.rmtree(tmp_path / "t" / "hf")
    with pytest.raises(DataError, match="came without a config") as caught:
        find_origin(tmp_path / "t")
    assert f"slime convert --from {tmp_path / 't'} --to hf --hf DIR" in caught.value.fix
    shutil.rmtree(tmp_path / "t" / "release")
    with pytest.raises(DataError, match="has no .metadata") as caught:
        find_origin(tmp_path / "t")
    assert "--hf" not in caught.value.fix


def test_rows_of_several_ranks_are_put_together(model, tmp_path):
    """A trainer's checkpoint of three ranks, uneven rows, with optimizer state beside the weights."""
    from slimecli.trainers._checkpoint import stored_weights

    tensors = dict(HfFolder(model).iterate())
    index, local = {}, [{}, {}, {}]
    for name, tensor in tensors.items():
        for kind in ("weight", "exp_avg"):
            chunk = -(-tensor.shape[0] // 3)
            rows = [[r * chunk, min((r + 1) * chunk, tensor.shape[0])] for r in range(3)]
            index[f"{kind}/{name}"] = {
                "shape": list(tensor.shape),
                "dtype": "float32",
                "rows": [[f"rank_{r:05d}.safetensors", a, b] for r, (a, b) in enumerate(rows)],
            }
            for r, (a, b) in enumerate(rows):
                local[r][f"{kind}/{name}"] = tensor[a:b].clone()
    for r in range(3):
        save_file(local[r], tmp_path / f"rank_{r:05d}.safetensors")
    files.write_json(tmp_path / "state.json", {"format": "slime-trainer-1", "tensors": index})
    found = dict(stored_weights(tmp_path))
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], t) for n, t in tensors.items())
    with pytest.raises(UsageError, match="lies in no run"):
        find_origin(tmp_path)


def test_folders_that_hold_no_weights_are_named(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        find_origin(tmp_path / "absent")
    with pytest.raises(DataError, match="holds no weights"):
        find_origin(tmp_path)


@pytest.mark.parametrize("place", ["m", "m/out", "."])
def test_the_source_is_never_the_target(place, tmp_path):
    source = tiny_model(tmp_path / "m")
    before = files.sha256(source)
    with pytest.raises(UsageError, match="lies in, or contains"):
        export(source, tmp_path / place, overwrite=True)
    assert files.sha256(source) == before


def test_only_an_export_is_replaced_and_only_when_told(model, tmp_path):
    out = tmp_path / "o"
    export(model, out)
    with pytest.raises(UsageError, match="exists already"):
        export(model, out, dtype="bfloat16")
    export(model, out, dtype="bfloat16", overwrite=True)
    assert set(HfFolder(out).dtypes.values()) == {torch.bfloat16}
    (out / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no export of slime"):
        export(model, out, overwrite=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    export(model, mine)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="no export of slime"):
        export(model, other, overwrite=True)
    assert (other / "thesis.tex").read_text() == "x"


def test_broken_weights_are_not_exported(tmp_path):
    source = tiny_model(tmp_path / "m")
    tensors = dict(HfFolder(source).iterate())
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_hf_folder(iter(tensors.items()), source, like=source)
    for options in ({}, {"quantize": "fp8"}):
        with pytest.raises(DataError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 NaN"):
            export(source, tmp_path / "o", **options)
        assert not (tmp_path / "o").exists() and not leftovers(tmp_path)


def flip(folder, name):
    """Change the highest byte of a number in the middle of a stored tensor."""
    entry = HfFolder(folder).entries[name]
    with entry.file.open("r+b") as handle:
        handle.seek(entry.offset + entry.nbytes // 2 | 3)
        byte = handle.read(1)[0]
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize(
    ("options", "name", "said"),
    [
        ({}, "model.layers.0.mlp.down_proj.weight", "reads back differently"),
        ({"quantize": "fp8"}, "model.norm.weight", "reads back differently"),
        ({"quantize": "fp8"}, "model.layers.0.mlp.down_proj.weight_scale_inv", "times what fp8 rounding allows"),
        ({"quantize": "fp8"}, "model.layers.0.mlp.down_proj.weight", "times what fp8 rounding allows"),
    ],
)
def test_a_disk_that_changes_a_byte_is_caught(options, name, said, model, tmp_path, monkeypatch):
    real = module.check_folder

    def damage(folder):
        flip(folder, name)
        return real(folder)

    monkeypatch.setattr(module, "check_folder", damage)
    with pytest.raises(DataError, match=said):
        export(model, tmp_path / "o", **options)
    assert not (tmp_path / "o").exists() and not leftovers(tmp_path)


def test_a_lost_tensor_is_caught(model, tmp_path):
    source = hf_origin(model)
    pairs = dict(source.weights(()))
    export(model, tmp_path / "o")
    result = open_weights(tmp_path / "o")
    with pytest.raises(DataError, match="a.b is not in the result"):
        module.compare(iter([("a.b", torch.zeros(1))]), result, None)
    pairs.pop("model.norm.weight")
    with pytest.raises(DataError, match="the result has model.norm.weight"):
        module.compare(iter(pairs.items()), result, None)
    with pytest.raises(DataError, match=r"has shape \[64\], not \[2\]"):
        module.compare(iter([("model.norm.weight", torch.zeros(2))]), result, None)


def test_killed_in_the_middle_leaves_nothing_that_looks_finished(model, tmp_path):
    code = (
        "import time, pathlib\n"
        "from slimecli.weights import export as m\nfrom slimecli.weights.origin import hf_origin\n"
        "def stop(notes):\n"
        "    print('written', flush=True); time.sleep(60)\n"
        f"m.export_weights(hf_origin(pathlib.Path({str(model)!r})), pathlib.Path({str(tmp_path / 'o')!r}), card=stop)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "o").exists() and not any(is_export(p) for p in tmp_path.iterdir())
    export(model, tmp_path / "o")
    assert is_export(tmp_path / "o")


def test_ctrl_c_before_anything_is_whole_cleans_up(model, tmp_path):
    def interrupted(skip):
        yield from list(HfFolder(model).iterate())[:3]
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="nothing had been written yet"):
        export_weights(dataclasses.replace(hf_origin(model), weights=interrupted), tmp_path / "o", card=str)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2 << 30), ("1.5K", 1500), ("1000", 1000), ("3G", 3 * 10**9)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 bananas", "0", "5iB"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="is no size"):
        parse_bytes(text)


def test_memory_follows_the_largest_tensor_not_the_model(tmp_path):
    """120 MB of weights in tensors of 2 MB, quantised and compared, in much less than that."""
    source = tiny_model(tmp_path / "m")
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": (1024, 1024) for i in range(30)}
    save_hf_folder(((n, torch.randn(s)) for n, s in tensors.items()), source, like=source, max_shard_bytes=30_000_000)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    code = (
        "import pathlib, resource, torch; torch.set_num_threads(1)\n"
        "from slimecli.weights.export import export_weights; from slimecli.weights.origin import hf_origin\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "origin, out = hf_origin(pathlib.Path('m')), pathlib.Path('o')\n"
        "before = peak()\n"
        "export_weights(origin, out, quantize='fp8', max_shard_bytes=10**7, card=lambda notes: '')\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 90_000, "kB"

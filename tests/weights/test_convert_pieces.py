"""Pieces: any cut of any tensor carries the same bytes; many tensors stay quick; memory does not follow the model."""

import dataclasses
import io
import itertools
import math
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from slimecli import env, files
from slimecli.errors import DataError
from slimecli.model_specs import get_spec
from slimecli.weights import pieces
from slimecli.weights.container import STORAGES, container, find_tensor
from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf
from slimecli.weights.fingerprint import ROW, tensor_hash
from slimecli.weights.hf import HfFolder, save_hf_folder
from slimecli.weights.ledger import Ledger, scan
from slimecli.weights.maps import hf_shapes
from slimecli.weights.pieces import blocks_of_range, cut, octets
from tests.models import tiny_model

DRAW = random.Random(0)
SHAPES = [(), (0,), (3, 0, 2), *(tuple(DRAW.choices(range(1, 7), k=DRAW.randint(1, 4))) for _ in range(80))]


@pytest.mark.parametrize("dtype", STORAGES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (1, 4, 2), (70_000,), (0, 3), ()], ids=str)
def test_a_container_is_what_torch_saves(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    raw, around = octets(tensor.reshape(-1)), container(dtype, shape)
    made = around.head + bytes(raw) + around.tail(raw)
    assert len(made) == around.size
    loaded = torch.load(io.BytesIO(made), weights_only=True)
    assert loaded.dtype == dtype and loaded.shape == shape and torch.equal(loaded, tensor)
    assert zipfile.ZipFile(io.BytesIO(made)).testzip() is None, "checksums"
    stream = io.BytesIO()
    torch.save(tensor, stream)
    for data in (made, stream.getvalue()):
        place = find_tensor(lambda count, at, data=data: data[at : at + count], len(data))
        assert (place.dtype, place.shape) == (dtype, shape)
        assert data[place.start : place.start + len(raw)] == bytes(raw)


def test_containers_of_other_things_are_refused():
    def refused(value):
        stream = io.BytesIO()
        torch.save(value, stream)
        data = stream.getvalue()
        with pytest.raises(ValueError, match="no container of a tensor|in order"):
            find_tensor(lambda count, at: data[at : at + count], len(data))

    refused([None])
    refused({"a": torch.zeros(2)})
    refused(torch.zeros(3, 4).t())
    with pytest.raises(ValueError, match="does not end as one"):
        find_tensor(lambda count, at: b"x" * count, 100)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuts_are_consecutive_and_small(shape, monkeypatch):
    limit = DRAW.randint(1, 40)
    monkeypatch.setattr(pieces, "PIECE", limit)
    blocks = list(cut(shape, 2))
    table, seen = np.arange(math.prod(shape)).reshape(shape), []
    for offset, size in blocks:
        part = table[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
        assert part.shape == size
        assert part.size * 2 <= limit or math.prod(size[:-1]) <= 1
        seen += part.reshape(-1).tolist()
    assert seen == list(range(table.size))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranges_are_their_blocks(shape):
    total = math.prod(shape)
    low, high = sorted(DRAW.randint(0, total) for _ in range(2))
    table, seen = np.arange(total).reshape(shape), []
    for offset, size in blocks_of_range(shape, low, high):
        seen += table[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].reshape(-1).tolist()
    assert seen == list(range(low, high))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 1001, ROW * 2 + 17])
def test_pieces_in_any_order_have_the_hash_of_the_whole(dtype, count):
    generator = torch.Generator().manual_seed(count)
    tensor = torch.randint(-100, 100, (count,), generator=generator).to(dtype)
    cuts = [0, *sorted(torch.randint(0, count + 1, (5,), generator=generator).tolist()), count]
    data, ledger = octets(tensor), Ledger()
    for low, high in reversed(list(itertools.pairwise(cuts))):
        found = scan(data[low * dtype.itemsize : high * dtype.itemsize], low * dtype.itemsize, dtype)
        ledger.add("a", len(data), found)
    assert ledger.hashes() == {"a": f"{int(tensor_hash(tensor)) & (2**64 - 1):016x}"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_value_that_is_not_finite_is_seen(dtype):
    tensor = torch.linspace(-400, 400, 999).to(dtype)
    assert scan(octets(tensor), 0, dtype).bad == 0
    broken = tensor.float()
    broken[[0, 77, 998]] = torch.tensor([float("nan"), -float("nan"), float("nan")])
    assert scan(octets(broken.to(dtype)), 0, dtype).bad == 3
    if dtype != torch.float8_e4m3fn:
        broken[5] = -float("inf")
        assert scan(octets(broken.to(dtype)), 0, dtype).bad == 4


def test_a_cast_that_overflows_is_told(tmp_path):
    hf = tiny_model(tmp_path / "hf")
    weights = dict(HfFolder(hf).iterate())
    weights["model.norm.weight"][3] = 70_000.0
    save_hf_folder(weights.items(), hf, like=hf)
    with pytest.raises(
        DataError, match=r"model\.norm\.weight holds 1 NaN or infinite.*\n.*too large for torch\.float16"
    ):
        hf_to_torch_dist(hf, tmp_path / "td", dtype=torch.float16)
    notes = hf_to_torch_dist(hf, tmp_path / "td", dtype=torch.bfloat16)
    rows = files.read_json(tmp_path / "td" / "certificate.json")["weights"]
    assert rows["model.norm.weight"]["source_dtype"] == "float32"
    assert rows["model.norm.weight"]["source"] != rows["model.norm.weight"]["result"]
    assert notes["logprob_check"]["max_abs_diff"] > 0


def many_experts(folder, experts):
    """A model with `experts` experts per layer of 8x8, written without transformers."""
    spec = get_spec("qwen3-30b-a3b")
    assert spec.moe is not None
    moe = dataclasses.replace(spec.moe, experts=experts, ffn=8, top_k=2)
    spec = dataclasses.replace(
        spec, layers=2, hidden=8, ffn=8, heads=2, kv_heads=1, head_dim=4, vocab=64, moe=moe, name="many"
    )
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    pairs = [(n, torch.randn(s, generator=generator).bfloat16()) for n, s in hf_shapes(spec).items()]
    save_hf_folder(pairs, folder, like=folder)
    files.write_json(folder / "config.json", spec.to_config())
    return len(pairs)


def test_many_tensors_are_quick(tmp_path):
    """Time in proportion to the number of tensors: a step that is quadratic in it would take minutes."""
    count = many_experts(tmp_path / "hf", 400)
    assert count > 2400
    begin = time.process_time()
    hf_to_torch_dist(tmp_path / "hf", tmp_path / "td")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back")
    assert time.process_time() - begin < 10
    before, after = HfFolder(tmp_path / "hf"), HfFolder(tmp_path / "back")
    assert before.names == after.names
    assert all(torch.equal(before.read(n), after.read(n)) for n in before.names[::97])


def test_fp8_both_ways(tmp_path):
    """Quantised on the way out, dequantised on the way in."""
    from slimecli.weights.quant import open_weights

    hf = tiny_model(tmp_path / "hf", dtype="bfloat16")
    hf_to_torch_dist(hf, tmp_path / "td")
    notes = torch_dist_to_hf(tmp_path / "td", tmp_path / "fp8", quantize="fp8")
    assert notes["verified"] and notes["logprob_check"] == {"skipped": "the result is quantised"}
    stored = HfFolder(tmp_path / "fp8")
    name = "model.layers.1.mlp.up_proj.weight"
    assert stored.dtypes[name] == torch.float8_e4m3fn and stored.shapes[f"{name}_scale_inv"] == (2, 1)
    hf_to_torch_dist(tmp_path / "fp8", tmp_path / "again")
    torch_dist_to_hf(tmp_path / "again", tmp_path / "plain")
    restored, plain = open_weights(tmp_path / "fp8"), HfFolder(tmp_path / "plain")
    assert "quantization_config" not in plain.config()
    original = HfFolder(hf)
    for name in plain.names:
        assert torch.equal(plain.read(name), restored.read(name))
        assert torch.allclose(plain.read(name).float(), original.read(name).float(), rtol=0.07, atol=0.002)


def test_quantised_in_pieces_equals_quantised_whole(tmp_path, monkeypatch):
    hf = tiny_model(tmp_path / "hf", dtype="bfloat16", intermediate_size=640)
    hf_to_torch_dist(hf, tmp_path / "td")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "whole", quantize="fp8")
    monkeypatch.setattr(pieces, "PIECE", 9000)
    torch_dist_to_hf(tmp_path / "td", tmp_path / "cut", quantize="fp8")
    whole, parts = HfFolder(tmp_path / "whole"), HfFolder(tmp_path / "cut")
    assert whole.names == parts.names
    assert all(torch.equal(whole.read(n).view(torch.uint8), parts.read(n).view(torch.uint8)) for n in whole.names)


MEASURE = """
import sys
from pathlib import Path
from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf
def peak():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) >> 10
before = peak()
work = hf_to_torch_dist if sys.argv[1] == "td" else torch_dist_to_hf
work(Path(sys.argv[2]), Path(sys.argv[3]), verify=True, jobs=1)
print(before, peak())
"""


def test_memory_does_not_follow_the_model(tmp_path, monkeypatch):
    """A tensor of 123 MB and pieces of 16 MB: a thread takes a few pieces, not the tensor."""
    spec = dataclasses.replace(
        get_spec("qwen3-0.6b"), layers=1, hidden=512, ffn=512, heads=2, kv_heads=2, head_dim=64, vocab=120_000
    )
    folder = tmp_path / "hf"
    folder.mkdir()
    pairs = [(n, torch.full(s, 0.5, dtype=torch.bfloat16)) for n, s in hf_shapes(spec).items()]
    save_hf_folder(pairs, folder, like=folder)
    # code from the repository would be needed to build it: no log-probs, which take a model's memory
    files.write_json(folder / "config.json", {**spec.to_config(), "architectures": ["Unknown"]})
    for to, source in (("td", folder), ("hf", tmp_path / "td")):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, to, str(source), str(tmp_path / to) + "2" * (to == "hf")],
            capture_output=True,
            text=True,
            env=env.child_env(PYTHONPATH=str(Path(__file__).parents[2])),
            check=True,
        )
        before, peak = map(int, done.stdout.split())
        assert peak - before < 80, f"{peak - before} MiB for a tensor of 117 MiB"

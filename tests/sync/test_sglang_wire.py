"""Buckets in SGLang's form: exactly the names that SGLang 0.5.21 admits, and the bits that went in."""

import base64
import io
import pickle
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from slimecli.engines.embedded.buckets import open_bucket
from slimecli.errors import SlimeError
from slimecli.sync import buckets, sglang_wire

Metadata = namedtuple("Metadata", "name shape dtype start_idx end_idx numel")
"""the fields of SGLang's FlattenedTensorMetadata, in its order"""
ADMITTED = {
    ("torch", "Tensor"): torch.Tensor,
    ("torch", "Size"): torch.Size,
    ("torch", "uint8"): torch.uint8,
    ("torch", "float32"): torch.float32,
    ("torch", "bfloat16"): torch.bfloat16,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): reductions.rebuild_typed_storage,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): reductions.rebuild_storage_filename,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): Metadata,
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): lambda *args: args,
}
"""of SafeUnpickler.ALLOWED_GLOBALS (sglang 0.5.21, srt/utils/common.py); SGLang refuses every other name"""


class Opener(pickle.Unpickler):
    """As strict as SGLang's."""

    def find_class(self, module, name):
        return ADMITTED[module, name]


def opened(text):
    return Opener(io.BytesIO(base64.b64decode(text))).load()


def reconstructed(data):
    """As SGLang's FlattenedTensorBucket does it."""
    flat = data["flattened_tensor"]
    return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in data["metadata"]}


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return {"a.b": torch.randn(3, 5), "c": torch.randn(7).bfloat16(), "d": torch.randn(1, 2, 3)}


def test_sglang_finds_the_bits_in_shared_memory(weights, tmp_path):
    made, manifest, total = buckets.stage(weights.items(), version=3, key=str(tmp_path))
    assert manifest.is_file() and total == sum(t.nbytes for t in weights.values())
    with sglang_wire.offered(made[0]) as text:
        found = reconstructed(opened(text))
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[n], t) for n, t in weights.items())
        del found
    buffer = Path(made[0]["handle"]["shm"])
    assert buffer.is_file(), "a reader that ends must not take the buffer with it"
    with sglang_wire.offered(made[0]) as again:
        assert torch.equal(reconstructed(opened(again))["a.b"], weights["a.b"])
    others = [p for p in buffer.parent.glob(buffer.stem.rpartition("-")[0] + "-*.bin") if p.samefile(buffer)]
    assert others == [buffer], "the names under which it was offered are gone"


def test_the_embedded_engine_finds_them_without_a_pickle(weights, tmp_path):
    made, _, _ = buckets.stage(weights.items(), version=3, key=str(tmp_path))
    headers, pairs = open_bucket(made[0])
    assert headers[1] == ("c", (7,), "bfloat16")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in pairs)


def test_buckets_are_cut_and_filled_in_order(weights):
    packed = list(buckets.pack(weights.items(), 128))
    assert [[e["name"] for e in entries] for _, entries in packed] == [["a.b", "c"], ["d"]]
    for flat, entries in packed:
        for entry in entries:
            part = flat[entry["offset"] : entry["offset"] + entry["nbytes"]]
            expected = weights[entry["name"]]
            assert torch.equal(part.view(expected.dtype).view(expected.shape), expected)
            assert entry["offset"] % 64 == 0
    alone = list(buckets.pack(weights.items(), 1))
    assert len(alone) == 3, "a tensor larger than a bucket has one to itself"


RAW = (
    torch.Tensor, (9,), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b"handle", 512, 64, False, b"counter", 3,
    b"event", True,
)  # fmt: skip
"""what torch's reduce_tensor gives for a buffer on a device"""


def test_device_memory_is_named_by_handle_and_uuid():
    handle = buckets.handle_of(RAW, "GPU-7")
    assert handle["device"] == "GPU-7" and handle["storage_size_bytes"] == 512
    back = buckets.cuda_values(handle)
    assert back["storage_handle"] == b"handle" and back["event_sync_required"] is True and back["size"] == [9]
    entry = {"name": "w", "dtype": "float32", "shape": [2], "offset": 0, "nbytes": 8}
    data = opened(sglang_wire.serialized({"handle": {"cuda": handle}, "nbytes": 9, "tensors": [entry]}))
    assert data["flattened_tensor"] == (*RAW[:6], "GPU-7", *RAW[7:]), "the arguments of rebuild_cuda_tensor, in order"
    assert data["metadata"] == [Metadata("w", torch.Size([2]), torch.float32, 0, 8, 8)]


@pytest.mark.parametrize(
    ("value"), [None, True, 0, -1, 127, 128, 2**31, -(2**40), "ä", b"\0\xff", (1, ("a",)), [1, [2]], {"k": [None]}]
)
def test_pickles_say_what_was_meant(value):
    assert pickle.loads(sglang_wire.pickled(value)) == value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"handle": {"shm": "/etc/passwd"}}, "no buffer under /dev/shm"),
        ({"handle": {"shm": "/dev/shm/../../etc/passwd"}}, "no buffer under /dev/shm"),
        ({"tensors": [{"name": "c", "dtype": "float32", "shape": [9], "offset": 64, "nbytes": 4096}]}, "outside"),
        ({"tensors": [{"name": "c", "dtype": "object", "shape": [1], "offset": 64, "nbytes": 4}]}, "dtype"),
        ({"tensors": None}, "not a bucket"),
        ({"nbytes": 10**9, "tensors": []}, "shorter than its bucket"),
    ],
)
def test_a_caller_cannot_choose_what_is_read(change, reason, weights, tmp_path):
    made, _, _ = buckets.stage(weights.items(), version=3, key=str(tmp_path))
    with pytest.raises(SlimeError, match=reason):
        list(open_bucket({**made[0], **change})[1])

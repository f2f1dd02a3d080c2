import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slimecli import files
from slimecli.errors import SlimeError
from slimecli.sync import shared_memory
from slimecli.sync.push import push
from slimecli.sync.stage import stage_weights
from slimecli.types import WeightReceipt
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def pairs(model: Path):
    return HfFolder(model).iterate()


class Engine:
    """Answers an update with what it was told to answer."""

    def __init__(self, answer=None, url=""):
        self.answer, self.url, self.seen = answer, url, []

    async def update_weights(self, update):
        self.seen.append(update)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.sleep(30)
        return self.answer


def receipt(staged, **changes):
    values = {"version": staged.update.version, "fingerprint": staged.fingerprint, "seconds": 0.1, "bytes_": 1}
    return WeightReceipt(**{**values, **changes})


@pytest.mark.parametrize("kind", ["in_process", "shared_memory", "disk"])
def test_every_kind_says_the_same_fingerprint(kind, model, tmp_path):
    staged = stage_weights(pairs(model), kind, version=3, folder=tmp_path / "w", like=model)
    assert staged.fingerprint == fingerprint(pairs(model))
    assert staged.update.kind == kind and staged.update.version == 3
    assert staged.bytes_ == HfFolder(model).nbytes


def test_disk_is_a_committed_model_folder(model, tmp_path):
    stage_weights(pairs(model), "disk", version=3, folder=tmp_path / "w", like=model)
    assert files.is_committed(tmp_path / "w")
    assert (tmp_path / "w" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert fingerprint(HfFolder(tmp_path / "w").iterate()) == fingerprint(pairs(model))


def test_shared_memory_holds_what_the_manifest_says_and_is_used_again(model, tmp_path):
    first = stage_weights(pairs(model), "shared_memory", version=1, folder=tmp_path, like=model).update.manifest
    doubled = ((n, t * 2) for n, t in pairs(model))
    second = stage_weights(doubled, "shared_memory", version=2, folder=tmp_path, like=model).update.manifest
    assert first == second
    manifest = json.loads(second.read_text())
    assert manifest["version"] == 2
    assert Path(manifest["buffer"]).stat().st_mode & 0o077 == 0, "other users read along"
    data = Path(manifest["buffer"]).read_bytes()
    for entry, (name, tensor) in zip(manifest["tensors"], pairs(model), strict=True):
        raw = bytearray(data[entry["offset"] : entry["offset"] + entry["nbytes"]])
        found = torch.frombuffer(raw, dtype=getattr(torch, entry["dtype"])).view(entry["shape"])
        assert entry["name"] == name and entry["offset"] % 64 == 0
        assert torch.equal(found, tensor * 2)


def test_shared_memory_is_gone_when_the_process_is(tmp_path):
    code = (
        "import torch, os, sys; from slimecli.sync.shared_memory import write;"
        "m, n = write([('a', torch.ones(5))], version=1, key='x'); print(m, flush=True);"
        "os._exit(0) if sys.argv[1] == 'killed' else None"
    )
    paths = {}
    for how in ("ended", "killed"):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True)
        paths[how] = Path(done.stdout.strip())
    assert not paths["ended"].exists() and not paths["ended"].with_suffix(".bin").exists()
    assert paths["killed"].exists()
    mine, _ = shared_memory.write([("a", torch.ones(5))], version=1, key="mine")
    shared_memory._clean_once.cache_clear()
    shared_memory._clean_once()
    assert not paths["killed"].exists() and not paths["killed"].with_suffix(".bin").exists()
    assert mine.exists() and str(os.getpid()) in mine.name


def test_shared_memory_that_is_too_small_names_the_size(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "_write_at", lambda fd, offset, data: False)
    seen = []

    def weights():
        for i in range(3):
            seen.append(i)
            yield f"w{i}", torch.zeros(250_000_000 // 4, dtype=torch.float32, device="meta")

    monkeypatch.setattr(shared_memory, "tensor_bytes", lambda tensor: memoryview(b""))
    with pytest.raises(SlimeError, match=r"(?s)weights take 0\.75 GB.*shm-size"):
        shared_memory.write(weights(), version=1, key="big")
    assert seen == [0, 1, 2], "the other ranks gather along: all must be iterated"


def test_push_compares_every_receipt(model, tmp_path):
    staged = stage_weights(pairs(model), "in_process", version=3, folder=tmp_path, like=model)
    good = Engine(receipt(staged))
    assert asyncio.run(push([good, good], staged, 5)) == [receipt(staged)] * 2
    assert asyncio.run(push(good, staged, 5)) == [receipt(staged)]
    assert good.seen[0].tensors.keys() == HfFolder(model).entries.keys()

    name = next(iter(staged.update.tensors))
    flipped = {k: t.clone() for k, t in staged.update.tensors.items()}
    flipped[name].view(-1)[0] += 1e-3
    other = fingerprint(flipped.items())
    bad = Engine(receipt(staged, fingerprint=other), url="http://127.0.0.1:9")
    with pytest.raises(SlimeError, match="engine 1 at http://127.0.0.1:9") as caught:
        asyncio.run(push([good, bad], staged, 5))
    assert (
        other in caught.value.what and staged.fingerprint in caught.value.what and "engine 0" not in caught.value.what
    )


def test_push_names_late_old_and_failed_engines(model, tmp_path):
    staged = stage_weights(pairs(model), "in_process", version=3, folder=tmp_path, like=model)
    engines = [
        Engine(None),
        Engine(receipt(staged, version=2)),
        Engine(SlimeError("out of memory")),
        Engine(receipt(staged)),
    ]
    with pytest.raises(SlimeError) as caught:
        asyncio.run(push(engines, staged, 0.05))
    assert "engine 0: no answer within 0.05 s" in caught.value.what
    assert "engine 1: holds version 2, not 3" in caught.value.what
    assert "engine 2: out of memory" in caught.value.what
    assert "engine 3" not in caught.value.what
    with pytest.raises(SlimeError, match="no engine"):
        asyncio.run(push([], staged, 1))


def test_a_bug_is_not_dressed_as_a_sync_error(model, tmp_path):
    staged = stage_weights(pairs(model), "in_process", version=3, folder=tmp_path, like=model)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(push(Engine(ZeroDivisionError()), staged, 1))

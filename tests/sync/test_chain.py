"""A chain of weight versions: who can follow follows, who cannot takes all, and a broken chain is never applied."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slimecli import files
from slimecli.errors import SlimeError
from slimecli.sync import chain
from slimecli.weights.fingerprint import fingerprint
from slimecli.weights.hf import HfFolder
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path):
    """stage(version) -> (Staged, weights): each version is one small step from the last."""
    held = dict(HfFolder(model).iterate())
    name = sorted(held)[1]

    def stage(version, share=0.02, like=model):
        torch.manual_seed(version)
        for key in (name, sorted(held)[-1]):
            moved = torch.rand(held[key].shape) < share
            held[key] = torch.where(moved, held[key] + 0.01, held[key])
        return chain.stage(iter(held.items()), version=version, folder=tmp_path / "c", like=like), dict(held)

    yield stage
    chain.forget(tmp_path / "c")


def kinds(folder):
    return [(link.version, link.kind) for link in chain.Chain.read(folder).links]


def test_the_first_version_is_whole_and_the_next_are_changes(run, tmp_path):
    first, weights = run(0)
    assert kinds(tmp_path / "c") == [(0, "full")] and first.changed == 1.0 and first.written == first.bytes
    second, later = run(1)
    assert kinds(tmp_path / "c") == [(0, "full"), (1, "changes")]
    assert second.bytes == first.bytes and second.written < 0.05 * first.written and 0 < second.changed < 0.01
    assert (first.mark.hexdigest(), second.mark.hexdigest()) == tuple(fingerprint(w.items()) for w in (weights, later))


def test_paths(run, tmp_path):
    marks = [run(version)[0].mark.hexdigest() for version in range(4)]
    known = chain.Chain.read(tmp_path / "c")

    def path(held, version=3):
        return [(link.version, link.kind) for link in known.path(held, version)]

    changes = [(v, "changes") for v in (1, 2, 3)]
    assert path(marks[3]) == [], "held already"
    assert path(marks[2]) == changes[2:] and path(marks[0]) == changes
    assert path("somebody else's") == path("") == [(0, "full"), *changes]
    assert path(marks[0], 2) == changes[:2]
    assert path(marks[3], 2) == [(0, "full"), *changes[:2]], "back is by the last whole version"
    with pytest.raises(SlimeError, match="does not lead to version 9"):
        path("", 9)


def test_a_version_that_is_staged_once_more_leads_where_it_did(run, tmp_path):
    """As where all engines were lost while they took it: who comes next comes from an older one."""
    run(0)
    chain.materialise(tmp_path / "c", 0)
    run(1)
    _, weights = run(1, share=0.0)
    whole = chain.materialise(tmp_path / "c", 1)
    assert fingerprint(HfFolder(whole).iterate()) == fingerprint(weights.items())
    _, weights = run(2)
    assert fingerprint(HfFolder(chain.materialise(tmp_path / "c", 2)).iterate()) == fingerprint(weights.items())


def test_changes_from_other_weights_are_not_written(run, tmp_path):
    run(0), run(1), run(2)
    folder = tmp_path / "c"
    chain.materialise(folder, 1)
    (folder / "d000002").rename(folder / "gone")
    (folder / "d000001").rename(folder / "d000002")
    with pytest.raises(SlimeError, match="the changes to version 1 are applied already"):
        chain.materialise(folder, 2)


def test_a_chain_that_leads_in_circles_leads_nowhere(run, tmp_path):
    run(0), run(1)
    told = files.read_json(tmp_path / "c" / chain.NAME)
    told["links"] = [{**link, "base_version": 1} for link in told["links"] if link["kind"] == "changes"]
    files.write_json(tmp_path / "c" / chain.NAME, told)
    with pytest.raises(SlimeError, match="does not lead to version 1"):
        chain.Chain.read(tmp_path / "c").path("", 1)


def test_a_restarted_trainer_begins_anew(run, tmp_path):
    run(0), run(1)
    chain.forget(tmp_path / "c")
    staged, _ = run(2)
    assert kinds(tmp_path / "c") == [(2, "full")] and staged.changed == 1.0
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["chain.json", "v000002"]


@pytest.mark.parametrize(("name", "value"), [("ROOM", 1e-9), ("MOST", 1)])
def test_a_long_chain_gets_a_new_whole_version_that_followers_need_not_read(run, tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(chain, name, value)
    marks = [run(version)[0].mark.hexdigest() for version in range(3)]
    known = chain.Chain.read(tmp_path / "c")
    assert kinds(tmp_path / "c") == [(2, "changes"), (2, "full")], "older ones are gone"
    assert [link.kind for link in known.path(marks[1], 2)] == ["changes"]
    assert [link.kind for link in known.path(marks[0], 2)] == ["full"]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["chain.json", "d000002", "v000002"]


def test_weights_that_come_or_go_are_an_error(run, tmp_path, model):
    _, held = run(0)
    with pytest.raises(SlimeError, match="new was not among the weights of version 0"):
        chain.stage(iter([*held.items(), ("new", torch.zeros(1))]), version=1, folder=tmp_path / "c", like=model)
    _, held = run(2)
    assert kinds(tmp_path / "c") == [(2, "full")], "after a failure all is staged anew"
    with pytest.raises(SlimeError, match=f"{min(held)} is no longer"):
        left = {n: t for n, t in held.items() if n != min(held)}
        chain.stage(iter(left.items()), version=3, folder=tmp_path / "c", like=model)


def test_a_folder_of_all_weights_follows_the_chain(run, tmp_path):
    """For servers that cannot apply changes."""
    folder = tmp_path / "c"
    for version in range(3):
        _, weights = run(version)
        whole = chain.materialise(folder, version)
        assert fingerprint(HfFolder(whole).iterate()) == fingerprint(weights.items())
    assert (whole / "config.json").is_file()
    before = {p.name: p.stat().st_mtime_ns for p in whole.glob("*.safetensors")}
    assert chain.materialise(folder, 2) == whole
    assert {p.name: p.stat().st_mtime_ns for p in whole.glob("*.safetensors")} == before, "held already"
    (whole / "STATE.json").unlink()  # as a crash in the midst of writing leaves it
    chain.materialise(folder, 2)
    assert fingerprint(HfFolder(whole).iterate()) == fingerprint(weights.items())


def test_several_at_once_bring_the_folder_forward_once(run, tmp_path):
    run(0)
    chain.materialise(tmp_path / "c", 0)
    _, weights = run(1)
    with ThreadPoolExecutor(4) as pool:
        out = list(pool.map(lambda _: chain.materialise(tmp_path / "c", 1), range(4)))
    assert len(set(out)) == 1 and fingerprint(HfFolder(out[0]).iterate()) == fingerprint(weights.items())


def test_damaged_changes_reach_no_folder(run, tmp_path):
    folder = tmp_path / "c"
    _, old = run(0)
    whole = chain.materialise(folder, 0)
    run(1)
    path = folder / "d000001" / "delta.bin"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 4
    path.write_bytes(raw)
    with pytest.raises(SlimeError, match="weight"):
        chain.materialise(folder, 1)
    assert fingerprint(HfFolder(whole).iterate()) == fingerprint(old.items()), "nothing was written"


def test_a_full_disk_is_named_and_leaves_the_chain(run, tmp_path, monkeypatch):
    run(0)
    before = files.read_json(tmp_path / "c" / "chain.json")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slimecli.sync.delta.encode", full)
    with pytest.raises(SlimeError, match="disk full"):
        run(1)
    monkeypatch.undo()
    assert files.read_json(tmp_path / "c" / "chain.json") == before
    run(2)
    assert kinds(tmp_path / "c") == [(2, "full")]


def test_no_chain(tmp_path):
    with pytest.raises(SlimeError, match="holds no chain"):
        chain.Chain.read(tmp_path)

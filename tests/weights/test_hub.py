"""fetch() against a hub on loopback: layout, resume, pins, selection, and every refusal."""

import errno
import hashlib
import shutil

import pytest

from slimecli.errors import DataError, InterruptedRunError, SlimeError, UsageError
from slimecli.weights import hub as module
from slimecli.weights import transfer
from slimecli.weights.hub import Access
from slimecli.weights.listing import HubFile

WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": b'{"model_type": "nothing known"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "README.md": b"read me",
    "modeling_x.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same once more",
    "onnx/model.json": b"{}",
    ".gitattributes": b"",
}
TAKEN = {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
SILENT = "http://127.0.0.1:9"


def fetch(repo, **how):
    access = {k: how.pop(k) for k in ("endpoint", "offline", "verify") if k in how}
    return module.fetch(repo, access=Access(**access), **how)


@pytest.fixture
def tiny(online):
    online.add("me/tiny", FILES)
    return online


def names(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_a_model_lands_in_the_layout_that_hub_libraries_share(tiny, tmp_path):
    got = fetch("me/tiny")
    commit = tiny.repos["model", "me/tiny"].branches["main"]
    assert got.commit == commit and got.source == "hub" and got.fetched_bytes == sum(len(FILES[n]) for n in TAKEN)
    assert names(got.folder) == TAKEN == set(got.files)
    assert got.left == {
        "pickled": ["pytorch_model.bin"],
        "code": ["modeling_x.py"],
        "copy": ["consolidated.safetensors"],
        "other": [".gitattributes", "onnx/model.json"],
    }
    from huggingface_hub import snapshot_download

    found = snapshot_download("me/tiny", cache_dir=tmp_path / "hf" / "hub", local_files_only=True)
    assert found == str(got.folder)
    before = len(tiny.seen)
    again = fetch("me/tiny")
    assert again.fetched_bytes == 0 and len(tiny.seen) == before + 1  # what main means now, and nothing else
    assert fetch("me/tiny", revision=commit).folder == got.folder and len(tiny.seen) == before + 1


def test_a_file_that_the_library_downloaded_is_not_fetched_again(tiny, tmp_path):
    from huggingface_hub import hf_hub_download

    hf_hub_download("me/tiny", "model.safetensors", cache_dir=tmp_path / "hf" / "hub", endpoint=tiny.url)
    assert len(tiny.bodies("model.safetensors")) == 1
    assert fetch("me/tiny").fetched_bytes == sum(len(FILES[n]) for n in TAKEN) - len(WEIGHTS)
    assert len(tiny.bodies("model.safetensors")) == 1


def test_a_half_download_is_continued(tiny, tmp_path, monkeypatch, capsys):
    tiny.cut["model.safetensors"] = 30_000
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "TRIES", 1)
        with pytest.raises(SlimeError, match=r"model.safetensors: .*30000 of 102400 bytes have arrived") as told:
            fetch("me/tiny")
    assert "goes on from there" in told.value.fix
    tiny.cut.clear()
    tiny.seen.clear()
    got = fetch("me/tiny")
    assert [s.headers["range"] for s in tiny.bodies("model.safetensors")] == ["bytes=30000-"]
    assert got.fetched_bytes <= sum(len(FILES[n]) for n in TAKEN) - 30_000
    assert (got.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "GB of it there already" in capsys.readouterr().err
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


def test_a_connection_that_breaks_is_made_anew_within_one_call(tiny):
    tiny.cut["model.safetensors"] = 40_000
    got = fetch("me/tiny")
    asked = [s.headers.get("range") for s in tiny.bodies("model.safetensors")]
    assert asked == [None, "bytes=40000-", "bytes=80000-"]
    assert (got.folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_without_ranges_sends_all_again(tiny):
    tiny.ranges = False
    store = module.Request("me/tiny", "main", "model", None, (), (), tiny.url, False).store
    partial = store.partial(HubFile("x", len(WEIGHTS), sha256=hashlib.sha256(WEIGHTS).hexdigest()))
    partial.parent.mkdir(parents=True)
    partial.write_bytes(WEIGHTS[:1000])
    assert (fetch("me/tiny").folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("held", [b"x" * 500, b"x" * len(WEIGHTS), b"x" * (len(WEIGHTS) + 1)])
def test_a_partial_file_of_other_content_is_noticed(held, tiny, capsys):
    store = module.Request("me/tiny", "main", "model", None, (), (), tiny.url, False).store
    partial = store.partial(HubFile("x", len(WEIGHTS), sha256=hashlib.sha256(WEIGHTS).hexdigest()))
    partial.parent.mkdir(parents=True)
    partial.write_bytes(held)
    assert (fetch("me/tiny").folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "arrived damaged" in capsys.readouterr().err


def test_a_busy_server_is_asked_again(tiny):
    tiny.busy["model.safetensors"] = [503, 429, 500]
    assert (fetch("me/tiny").folder / "model.safetensors").read_bytes() == WEIGHTS
    tiny.busy["config.json"] = [503] * 20
    tiny.repos["model", "me/tiny"].commit({**FILES, "config.json": b"[]"})
    with pytest.raises(SlimeError, match=r"config.json: the server is busy \(HTTP 503\); 0 of 2 bytes"):
        fetch("me/tiny")
    assert len(tiny.bodies("config.json")) == 1 + transfer.TRIES


def test_a_connection_without_a_byte_for_long_is_made_anew(tiny, monkeypatch):
    monkeypatch.setattr(transfer, "SILENCE", 0.2)
    tiny.slow["model.safetensors"] = 0.5
    assert (fetch("me/tiny").folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [s.headers.get("range") for s in tiny.bodies("model.safetensors")][:2] == [None, "bytes=51200-"]


def test_large_files_come_from_where_the_hub_points_to(tiny, monkeypatch):
    tiny.redirect, tiny.token = True, "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (fetch("me/tiny").folder / "model.safetensors").read_bytes() == WEIGHTS
    assert any(s.path.startswith("/content/") for s in tiny.seen)


def test_a_file_damaged_on_the_way_is_fetched_once_more_then_refused(tiny, capsys):
    tiny.damage["model.safetensors"] = 1
    assert (fetch("me/tiny").folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "sha256" in capsys.readouterr().err
    tiny.add("me/other", {**FILES, "model.safetensors": WEIGHTS[::-1]})
    tiny.damage["model.safetensors"] = 9
    with pytest.raises(DataError, match=r"model.safetensors arrived damaged twice: sha256"):
        fetch("me/other")


@pytest.mark.parametrize(("content", "seen_without_hash"), [(b"short", True), (WEIGHTS[:-1] + b"!", False)])
def test_damage_in_the_cache_is_found_and_mended(content, seen_without_hash, tiny, capsys):
    file = fetch("me/tiny").folder / "model.safetensors"
    file.resolve().write_bytes(content)
    with pytest.raises(SlimeError, match=r"model.safetensors \("):
        fetch("me/tiny", offline=True, verify=True)
    got = fetch("me/tiny")
    assert (got.fetched_bytes > 0) is seen_without_hash
    got = fetch("me/tiny", verify=True)
    assert file.read_bytes() == WEIGHTS and got.folder == file.parent
    assert "model.safetensors: " in capsys.readouterr().err


def test_revisions_are_pinned(tiny):
    repo = tiny.repos["model", "me/tiny"]
    first = repo.branches["main"]
    repo.tags["v1"] = first
    second = repo.commit({**FILES, "README.md": b"second"})
    assert fetch("me/tiny", revision="v1").commit == fetch("me/tiny", revision=first).commit == first
    got = fetch("me/tiny")
    assert got.commit == second and (got.folder / "README.md").read_bytes() == b"second"
    assert (fetch("me/tiny", revision="v1", offline=True).folder / "README.md").read_bytes() == b"read me"
    assert len(tiny.bodies("model.safetensors")) == 1  # the same content in both


def test_data_set(online):
    online.add(
        "me/rows", {"data/train.jsonl": b"{}\n", "load.py": b"", "x.pkl": b"", "tokens.bin": b"1"}, kind="dataset"
    )
    got = fetch("me/rows", kind="dataset")
    assert names(got.folder) == {"data/train.jsonl", "tokens.bin"} and got.left == {
        "code": ["load.py"],
        "pickled": ["x.pkl"],
    }
    assert "datasets--me--rows" in str(got.folder)


def test_selection(tiny):
    got = fetch("me/tiny", allow=("*.py",))
    assert names(got.folder) == {"modeling_x.py"}
    assert names(fetch("me/tiny", ignore=("*.md",)).folder) == TAKEN - {"README.md"} | {"modeling_x.py"}
    assert fetch("me/tiny", ignore=("*.safetensors",)).is_partial and not fetch("me/tiny", ignore=("*.md",)).is_partial
    with pytest.raises(DataError, match="has none of the files wanted; it has .gitattributes"):
        fetch("me/tiny", allow=("*.gguf",))


def test_out_is_a_plain_folder_that_is_continued_and_not_overwritten(tiny, tmp_path):
    out = tmp_path / "out"
    got = fetch("me/tiny", out=out)
    assert got.folder == out and {n for n in names(out) if not n.startswith(".cache")} == TAKEN
    assert fetch("me/tiny", out=out).fetched_bytes == 0
    assert fetch("me/tiny", out=out, offline=True).commit == got.commit
    second = tiny.repos["model", "me/tiny"].commit({**FILES, "README.md": b"another"})
    fetch("me/tiny", out=out, allow=("*.json",))
    assert fetch("me/tiny", out=out).commit == second and (out / "README.md").read_bytes() == b"another"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("my own")
    with pytest.raises(UsageError, match="has another README.md"):
        fetch("me/tiny", out=mine)
    assert (mine / "README.md").read_text() == "my own" and len(names(mine)) == 1


def test_out_takes_from_the_cache_what_is_there(tiny, tmp_path):
    fetch("me/tiny")
    assert fetch("me/tiny", out=tmp_path / "out").fetched_bytes == 0
    assert len(tiny.bodies("model.safetensors")) == 1
    got = fetch("me/tiny", out=tmp_path / "other", offline=True)
    assert (got.folder / "model.safetensors").read_bytes() == WEIGHTS


def test_offline_names_what_is_missing(tiny, monkeypatch):
    with pytest.raises(SlimeError, match="nothing of it; offline mode is on"):
        fetch("me/tiny", offline=True)
    fetch("me/tiny", allow=("*.json",))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SlimeError, match=r"README.md \(missing\); model.safetensors \(missing\)"):
        fetch("me/tiny")
    assert fetch("me/tiny", allow=("*.json",)).source == "cache"


def test_a_cache_that_another_program_filled_serves_offline(tiny, tmp_path):
    from huggingface_hub import snapshot_download

    found = snapshot_download("me/tiny", cache_dir=tmp_path / "hf" / "hub", endpoint=tiny.url)
    got = fetch("me/tiny", offline=True, verify=True)
    assert str(got.folder) == found and set(got.files) == TAKEN
    (got.folder / "model.safetensors").resolve().write_bytes(b"x" * len(WEIGHTS))
    with pytest.raises(SlimeError, match=r"model.safetensors \(sha256"):
        fetch("me/tiny", offline=True, verify=True)


def test_a_silent_hub(tiny, capsys):
    with pytest.raises(SlimeError, match=f"{SILENT} does not answer") as told:
        fetch("me/tiny", endpoint=SILENT)
    assert "HF_ENDPOINT" in told.value.fix
    commit = fetch("me/tiny").commit
    got = fetch("me/tiny", endpoint=SILENT)
    assert got.source == "cache" and got.commit == commit
    assert "does not answer" in capsys.readouterr().err
    tiny.api_status = 503
    assert fetch("me/tiny").source == "cache"
    with pytest.raises(SlimeError, match="HTTP 503"):
        fetch("me/absent")


def test_refusals_say_what_to_do(tiny, monkeypatch):
    tiny.add("me/gated", FILES, gated=True)
    tiny.add("me/hidden", FILES, private=True)
    tiny.add("me/rows", {"a.jsonl": b"{}"}, kind="dataset")
    tiny.repos["model", "me/tiny"].tags["v1.0"] = tiny.repos["model", "me/tiny"].branches["main"]
    for repo, how, what, fix in (
        (
            "me/gated",
            {},
            "me/gated is gated",
            f"open {tiny.url}/me/gated , accept, then `hf auth login` or set HF_TOKEN",
        ),
        ("me/hidden", {}, "or it is private", "HF_TOKEN"),
        ("Qwen/Qwen3-0.6", {}, "did you mean 'Qwen/Qwen3-0.6B'", "slime models"),
        ("me/rows", {}, "there is a dataset repository of that name", "with --dataset"),
        ("me/tiny", {"kind": "dataset"}, "there is a model repository of that name", "without --dataset"),
        ("me/tiny", {"revision": "v1.O"}, "did you mean 'v1.0'?); there are main, v1.0", "a tag"),
        ("me/tiny", {"revision": "f" * 40}, "no such revision", "commit"),
    ):
        with pytest.raises(SlimeError) as told:
            fetch(repo, **how)
        assert what in told.value.what and fix in told.value.fix, told.value
    with pytest.raises(UsageError, match="is not a repository name"):
        fetch("me/tiny/three")
    tiny.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "old")
    with pytest.raises(SlimeError, match="refuses access") as told:
        fetch("me/tiny")
    assert "/settings/tokens" in told.value.fix
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetch("me/gated").files.keys() == fetch("me/hidden").files.keys() == TAKEN


def test_only_pickles_is_said_before_anything_is_fetched(online):
    online.add("me/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(DataError, match=r"no safetensors weights, only pickled ones: pytorch_model.bin"):
        fetch("me/old")
    assert not online.bodies("config.json")
    assert set(fetch("me/old", allow=("*.bin",)).files) == {"pytorch_model.bin"}


@pytest.mark.parametrize(
    "name", ["../evil.json", "a/../../evil.json", "/etc/evil.json", "..\\evil.json", "C:/evil.json"]
)
def test_a_name_outside_the_folder_is_refused(name, online, tmp_path):
    online.add("me/evil", {**FILES, name: b"{}"})
    with pytest.raises(DataError, match="outside its folder"):
        fetch("me/evil")
    assert not (tmp_path / "hf").exists() and not online.bodies("config.json")


def test_a_full_disk_is_foreseen(tiny, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    monkeypatch.setattr(module, "SPARE_BYTES", 0)
    with pytest.raises(SlimeError, match=r"needs 0.00 GB with some to spare, .* has 0.00 GB"):
        fetch("me/tiny")
    assert not tiny.bodies("model.safetensors")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=103_000))
    assert fetch("me/tiny", ignore=("README.md",)).files["model.safetensors"] == len(WEIGHTS)


def test_a_disk_that_fills_meanwhile_is_named(tiny, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer, "_stream", full)
    with pytest.raises(SlimeError, match="disk full while writing"):
        fetch("me/tiny")


def test_an_interrupt_keeps_what_has_arrived(tiny, monkeypatch, tmp_path):
    stream = transfer._stream

    def interrupted(job, *args):
        if job.file.path == "model.safetensors":
            tiny.cut["model.safetensors"] = 20_000
            with pytest.raises(transfer.transport_error()):
                stream(job, *args)
            raise KeyboardInterrupt
        stream(job, *args)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_stream", interrupted)
        with pytest.raises(InterruptedRunError, match="to come"):
            fetch("me/tiny")
    tiny.cut.clear()
    fetch("me/tiny")
    assert tiny.bodies("model.safetensors")[-1].headers["range"] == "bytes=20000-"


def test_files_above_the_limit_of_plain_http_go_through_the_library(tiny, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    calls = []
    real = module._bring_huge

    def bring(asked, job, commit):
        calls.append(job.file.path)
        with monkeypatch.context() as patch:
            patch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 10**9)
            real(asked, job, commit)

    monkeypatch.setattr(module, "_bring_huge", bring)
    assert (fetch("me/tiny").folder / "model.safetensors").read_bytes() == WEIGHTS
    shutil.rmtree(tmp_path / "hf")
    assert (fetch("me/tiny", out=tmp_path / "o").folder / "model.safetensors").read_bytes() == WEIGHTS
    assert calls == ["model.safetensors"] * 2


def test_local_sources(tiny, tmp_path):
    for name, data in FILES.items():
        path = tmp_path / "mirror" / "me" / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    mirror, folder = f"file://{tmp_path / 'mirror'}", tmp_path / "mirror" / "me" / "tiny"
    assert fetch(f"file://{folder}").folder == folder == fetch("me/tiny", endpoint=mirror).folder
    got = fetch("me/tiny", endpoint=mirror, out=tmp_path / "out")
    assert names(tmp_path / "out") - {".cache/slime/folder.json"} == TAKEN and got.source == "folder"
    assert fetch("me/tiny", endpoint=mirror, out=tmp_path / "out").folder == tmp_path / "out"
    with pytest.raises(SlimeError, match="is not in the mirror"):
        fetch("me/absent", endpoint=mirror)
    with pytest.raises(SlimeError, match="is not in the mirror"):
        fetch("me/tiny", endpoint=mirror, revision="v1")
    with pytest.raises(UsageError, match="has no revision"):
        fetch(f"file://{folder}", revision="v1")
    with pytest.raises(DataError, match="is not a folder"):
        fetch("file:///nowhere")
    with pytest.raises(UsageError, match="not the address of a hub"):
        fetch("me/tiny", endpoint="hf-mirror.com")
    commit = fetch("me/tiny").commit
    cached = fetch("me/tiny", endpoint=f"file://{tmp_path / 'hf' / 'hub'}", verify=True)
    assert cached.commit == commit and cached.source == "folder"

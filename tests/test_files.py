import errno
import os
import subprocess
import time
from pathlib import Path

import pytest

from slimecli import files
from slimecli.errors import DataError, SlimeError, UsageError


def test_a_file_is_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "a" / "x.json"
    files.write_json(path, {"b": 1, "a": 2})
    assert path.read_text() == '{\n  "a": 2,\n  "b": 1\n}\n'

    def fail(fd):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SlimeError, match="disk full"):
        files.write_text(path, "new")
    assert files.read_json(path) == {"a": 2, "b": 1}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_a_broken_json_file_is_named_with_line_and_column(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{\n  "a": ,\n}')
    with pytest.raises(DataError, match=r"x\.json:2:8"):
        files.read_json(path)


def test_a_folder_appears_with_its_marker_or_not_at_all(tmp_path):
    final = tmp_path / "step"
    with files.committed_folder(final, {"step": 3}) as folder:
        (folder / "weights").write_bytes(b"12345")
        assert not final.exists()
    assert files.is_committed(final)
    assert files.read_json(final / files.DONE)["step"] == 3
    with pytest.raises(RuntimeError), files.committed_folder(final) as folder:
        (folder / "weights").write_bytes(b"1")
        raise RuntimeError
    assert (final / "weights").read_bytes() == b"12345"
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_a_damaged_folder_does_not_count_as_committed(tmp_path):
    final = tmp_path / "step"
    with files.committed_folder(final) as folder:
        (folder / "weights").write_bytes(b"12345")
    assert files.damage(final) == ""
    (final / "weights").write_bytes(b"123")
    assert not files.is_committed(final)
    assert files.damage(final) == "weights has 3 bytes, not the 5 it was written with"
    (final / "weights").unlink()
    assert not files.is_committed(final)
    assert files.damage(final) == "weights is gone"
    (final / files.DONE).unlink()
    assert files.damage(final) == "", "it was never complete"
    assert not files.is_committed(tmp_path / "nowhere")


def test_a_new_commit_replaces_the_old_folder(tmp_path):
    for text in ("old", "new"):
        with files.committed_folder(tmp_path / "x") as folder:
            (folder / text).write_text(text)
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == [files.DONE, "new"]


def test_the_hash_of_a_folder_depends_on_names_and_contents_only(tmp_path):
    for name in ("a", "b"):
        with files.committed_folder(tmp_path / name, {"who": name}) as folder:
            (folder / "w").write_text("same")
    assert files.sha256(tmp_path / "a") == files.sha256(tmp_path / "b")
    (tmp_path / "b" / "w").rename(tmp_path / "b" / "v")
    assert files.sha256(tmp_path / "a") != files.sha256(tmp_path / "b")


def test_a_damaged_manifest_means_not_committed_and_other_damage_is_told(tmp_path):
    with files.committed_folder(tmp_path / "x") as folder:
        (folder / "a").write_text("1")
    (tmp_path / "x" / files.DONE).write_text("")
    assert not files.is_committed(tmp_path / "x")
    path = tmp_path / "run.json"
    for damage in (b"{", b"\xff"):
        path.write_bytes(damage)
        with pytest.raises(DataError, match="restore the file from a copy"):
            files.read_json(path)


def test_a_file_on_the_way_and_a_link_at_the_end(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(UsageError, match="is a file, not a folder"), files.committed_folder(tmp_path / "f" / "x"):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with files.committed_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "target" / "a").is_file() and (tmp_path / "link").is_symlink()


def test_what_a_killed_process_left_goes_with_the_next_one(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    hour = time.time() - 3600
    left = {name: tmp_path / name for name in (f".m.{ended.pid}.tmp", f".m.{ended.pid}.old", f".m.{os.getppid()}.tmp")}
    others = [tmp_path / name for name in (f".mine.{ended.pid}.tmp", f".m.x.{ended.pid}.tmp", ".m.tmp")]
    for folder in [*left.values(), *others]:
        folder.mkdir()
        (folder / "weights").write_bytes(b"1")
    new = tmp_path / f".m.{ended.pid}1.tmp"
    new.mkdir()  # perhaps of another machine, where its process is alive
    for path in [p for p in tmp_path.rglob("*") if p != new]:
        os.utime(path, (hour, hour))
    with files.committed_folder(tmp_path / "m") as folder:
        (folder / "weights").write_bytes(b"2")
    assert {p.name for p in tmp_path.iterdir()} == {"m", new.name, f".m.{os.getppid()}.tmp", *(p.name for p in others)}


def test_the_old_folder_is_back_where_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    final, real = tmp_path / "m", Path.rename
    with files.committed_folder(final) as folder:
        (folder / "weights").write_bytes(b"1")

    def rename(self, target):
        if self.suffix == ".tmp":
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt), files.committed_folder(final) as folder:
        (folder / "weights").write_bytes(b"2")
    assert files.is_committed(final) and (final / "weights").read_bytes() == b"1"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_folder_where_a_file_is_to_be_is_told(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        files.write_text(tmp_path, "x")
    assert list(tmp_path.iterdir()) == []


def test_a_glance_sees_size_ends_and_what_changed_all_over(tmp_path):
    path = tmp_path / "weights"
    whole = bytes(range(256)) * (40 << 10)  # 10 MiB, of which 4 are looked at
    path.write_bytes(whole)
    seen = {files.glance(path)}
    for changed in (
        whole[:-1],
        whole[:-1] + b"!",
        b"!" + whole[1:],
        bytes(b ^ (i % 5000 == 0) for i, b in enumerate(whole)),
    ):
        path.write_bytes(changed)
        seen.add(files.glance(path))
    assert len(seen) == 5
    path.write_bytes(whole)
    assert files.glance(path) in seen
    path.write_bytes(b"")
    assert files.glance(path) not in seen

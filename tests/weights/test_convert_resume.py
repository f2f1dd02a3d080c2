"""An interrupted conversion leaves nothing that looks finished, and the next one goes on with what it did."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimecli import env, files
from slimecli.errors import InterruptedRunError, SlimeError, UsageError
from slimecli.weights import partial, pieces
from slimecli.weights.convert import hf_to_torch_dist, torch_dist_to_hf
from slimecli.weights.pipeline import Carrier
from tests.forked import slime, succeed
from tests.models import tiny_model

KILL_POINTS = 8


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Many tasks and many entries in the journal, although the model is tiny; forked children have it too."""
    monkeypatch.setattr(pieces, "PIECE", 20_000)
    monkeypatch.setattr(partial, "SYNC_BYTES", 60_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def assert_same(one, other):
    """The same files with the same bytes, but for the times in DONE.json."""
    (left, sizes), (right, other_sizes) = contents(one), contents(other)
    assert sizes == other_sizes and sorted(left) == sorted(right)
    assert [name for name in left if left[name] != right[name]] == []


def contents(folder):
    """Every byte but those that tell the time, or the state of slime's own repository, which a commit changes."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    certificate = json.loads(found["certificate.json"])
    found["certificate.json"] = json.dumps({k: v for k, v in certificate.items() if k != "made_by"}).encode()
    done = json.loads(found.pop(files.DONE))
    return found, done["files"]


def test_the_result_does_not_depend_on_the_threads(model, tmp_path):
    for jobs in (1, 3):
        hf_to_torch_dist(model, tmp_path / f"td{jobs}", jobs=jobs)
        torch_dist_to_hf(tmp_path / "td1", tmp_path / f"hf{jobs}", jobs=jobs)
    assert_same(tmp_path / "td1", tmp_path / "td3")
    assert_same(tmp_path / "hf1", tmp_path / "hf3")


@pytest.mark.parametrize("to", ["torch_dist", "hf"])
def test_killed_anywhere_and_run_again_equals_straight(model, tmp_path, to):
    hf_to_torch_dist(model, tmp_path / "source")
    words = ["convert", "--to", to, *(["--hf", str(model)] if to == "torch_dist" else ["--from", "source"])]
    straight = succeed(*words, "--out", "straight", folder=tmp_path)
    assert straight.fsyncs > 2 * KILL_POINTS
    continued = 0
    for point in range(KILL_POINTS):
        out = tmp_path / f"out{point}"
        kill_at = 2 + (straight.fsyncs - 2) * point // KILL_POINTS
        assert slime(*words, "--out", out.name, folder=tmp_path, kill_at=kill_at).code == -9
        assert not out.exists() or files.is_committed(out)
        if point == 3:
            assert slime(*words, "--out", out.name, folder=tmp_path, kill_at=5).code == -9
        again = succeed(*words, "--out", out.name, folder=tmp_path)
        continued += "continuing" in again.err
        assert_same(out, tmp_path / "straight")
        assert not (tmp_path / f"{out.name}.partial").exists()
    assert continued >= KILL_POINTS // 2


def interrupted_after(monkeypatch, tasks, error=KeyboardInterrupt):
    """The conversion is stopped when it has flushed so many times."""
    real, made = partial.Partial._keep, [0]

    def keep(self, pending):
        real(self, pending)
        made[0] += 1
        if made[0] == tasks:
            raise error

    monkeypatch.setattr(partial.Partial, "_keep", keep)


def test_an_interrupt_says_that_it_can_go_on(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupted_after(patch, 3)
        with pytest.raises(InterruptedRunError, match=r"kept in .*td\.partial\n.*the same command again continues"):
            hf_to_torch_dist(model, tmp_path / "td")
    assert not files.is_committed(tmp_path / "td.partial")
    assert not (tmp_path / "td.partial" / "latest_checkpointed_iteration.txt").exists()
    journal = (tmp_path / "td.partial" / partial.JOURNAL).read_text().splitlines()
    kept = {json.loads(line)[0] for line in journal[1:]}
    taken = []
    real = Carrier.fill
    monkeypatch.setattr(Carrier, "fill", lambda self, task, out: taken.append(task.number) or real(self, task, out))
    notes = hf_to_torch_dist(model, tmp_path / "td")
    assert notes["bytes_reused"] >= 3 * 60_000
    assert len(taken) == len(set(taken)) > 0
    assert not set(taken) & kept
    assert [p.name for p in tmp_path.iterdir()] == ["td"]


SLOW = """
import time
from slimecli.weights import direct, partial, pieces
pieces.PIECE, partial.SYNC_BYTES = 20_000, 60_000
real = direct.DiskFile.write
direct.DiskFile.write = lambda self, offset, data: (time.sleep(0.1), real(self, offset, data))
from slimecli.cli import main
main()
"""


def test_ctrl_c_at_the_command_line(model, tmp_path):
    """Exit code 130 and a sentence, not a traceback; the same command line then continues."""
    words = ["convert", "--hf", str(model), "--to", "torch_dist", "--out", "td"]
    slow = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=env.child_env(PYTHONPATH=str(Path(__file__).parents[2]), NO_COLOR="1"),
    )
    journal, deadline = tmp_path / "td.partial" / partial.JOURNAL, time.monotonic() + 60
    while time.monotonic() < deadline and not (journal.is_file() and len(journal.read_text().splitlines()) > 3):
        time.sleep(0.02)
    slow.send_signal(signal.SIGINT)
    _, said = slow.communicate(timeout=60)
    assert slow.returncode == 130
    assert "error: interrupted; what was done is kept in td.partial\n" in said and "Traceback" not in said
    again = succeed(*words, folder=tmp_path)
    assert "continuing" in again.err and files.is_committed(tmp_path / "td")
    hf_to_torch_dist(model, tmp_path / "straight")
    assert_same(tmp_path / "td", tmp_path / "straight")


def test_damage_in_what_was_kept_is_written_again(model, tmp_path, monkeypatch):
    hf_to_torch_dist(model, tmp_path / "straight")
    with monkeypatch.context() as patch:
        interrupted_after(patch, 3)
        with pytest.raises(InterruptedRunError):
            hf_to_torch_dist(model, tmp_path / "td")
    data = tmp_path / "td.partial" / "release" / "__0_0.distcp"
    damaged = bytearray(data.read_bytes())
    damaged[5000] ^= 1
    data.write_bytes(damaged)
    hf_to_torch_dist(model, tmp_path / "td", verify=False)
    assert (tmp_path / "td" / "release" / "__0_0.distcp").read_bytes() == (
        tmp_path / "straight" / "release" / "__0_0.distcp"
    ).read_bytes()


def test_another_option_starts_over_and_says_so(model, tmp_path, monkeypatch, capsys):
    import torch

    with monkeypatch.context() as patch:
        interrupted_after(patch, 2)
        with pytest.raises(InterruptedRunError):
            hf_to_torch_dist(model, tmp_path / "td")
    notes = hf_to_torch_dist(model, tmp_path / "td", dtype=torch.bfloat16)
    assert "begun with another dtype, plan: starting over" in " ".join(capsys.readouterr().err.split())
    assert notes["bytes_reused"] == 0


def test_a_changed_source_starts_over(tmp_path, monkeypatch, capsys):
    hf = tiny_model(tmp_path / "hf")
    with monkeypatch.context() as patch:
        interrupted_after(patch, 2)
        with pytest.raises(InterruptedRunError):
            hf_to_torch_dist(hf, tmp_path / "td")
    tiny_model(hf, seed=1)
    assert hf_to_torch_dist(hf, tmp_path / "td")["bytes_reused"] == 0
    assert "another source: starting over" in " ".join(capsys.readouterr().err.split())


def test_done_twice_is_done_once(model, tmp_path, capsys):
    first = hf_to_torch_dist(model, tmp_path / "td")
    before = (tmp_path / "td" / files.DONE).stat().st_mtime_ns
    second = hf_to_torch_dist(model, tmp_path / "td")
    assert second["seconds"] == first["seconds"] and "nothing to do" in capsys.readouterr().err
    assert (tmp_path / "td" / files.DONE).stat().st_mtime_ns == before
    assert hf_to_torch_dist(model, tmp_path / "td", vocab_multiple=64)["verified"]


def test_folders_of_others_are_left_alone(model, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="no result of `slime convert`"):
        hf_to_torch_dist(model, tmp_path / "mine")
    with pytest.raises(UsageError, match="is the source itself"):
        hf_to_torch_dist(model, model)
    (tmp_path / "empty").mkdir()
    assert hf_to_torch_dist(model, tmp_path / "empty")["verified"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_two_at_a_time_are_refused(model, tmp_path):
    held = partial.Partial(tmp_path / "td", {})
    with pytest.raises(UsageError, match="another `slime convert` is writing"):
        hf_to_torch_dist(model, tmp_path / "td")
    held.close()
    assert hf_to_torch_dist(model, tmp_path / "td")["verified"]


def test_a_disk_too_small_is_told_before(model, tmp_path, monkeypatch):
    real = partial.shutil.disk_usage
    monkeypatch.setattr(partial.shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    with pytest.raises(SlimeError, match=r"takes \d+ bytes, but only 1000 bytes are free"):
        hf_to_torch_dist(model, tmp_path / "td")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_told_and_continued(model, tmp_path, monkeypatch):
    real, made = os.pwrite, [0]

    def full(fd, data, offset):
        made[0] += 1
        if made[0] > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(SlimeError, match=r"disk full while writing .*td; what was done is kept.*\n.*it continues"):
            hf_to_torch_dist(model, tmp_path / "td", jobs=1)
    assert [p.name for p in tmp_path.iterdir()] == ["td.partial"]
    assert hf_to_torch_dist(model, tmp_path / "td")["bytes_reused"] > 0


def test_a_limit_on_file_size_is_told(model, tmp_path):
    def child():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            hf_to_torch_dist(model, tmp_path / "td", jobs=1)
        except SlimeError as error:
            os._exit(7 if "ulimit" in error.what else 8)
        os._exit(9)

    pid = os.fork()
    if pid == 0:
        child()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not (tmp_path / "td").exists()

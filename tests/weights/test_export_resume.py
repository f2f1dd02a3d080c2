"""An interrupted export leaves nothing that looks finished, and the next one goes on after its last whole shard."""

import shutil

import pytest

from slimecli import files
from slimecli.errors import InterruptedRunError, UsageError
from slimecli.recipe import load_recipe
from slimecli.rundir import create_run
from slimecli.sync.stage import stage_weights
from slimecli.trainers._checkpoint import save_state
from slimecli.weights import partial
from slimecli.weights.convert import hf_to_torch_dist
from slimecli.weights.export import export_weights
from slimecli.weights.hf import HfFolder, read_header
from slimecli.weights.origin import find_origin, hf_origin
from tests.forked import slime, succeed
from tests.models import edit_json, tiny_model

KILL_POINTS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def export(source, out, **options):
    return export_weights(hf_origin(source), out, card=lambda notes: f"# {notes['fingerprint']}\n", **options)


@pytest.mark.parametrize("quantize", ["", "fp8"])
def test_killed_anywhere_the_old_export_stays_and_the_next_one_equals_straight(model, tmp_path, runs_root, quantize):
    run = create_run("r", load_recipe("", ("steps=2", "sft.steps=0", "model.name='quickstart'", "model.source='init'")))
    for step in (1, 2):
        pairs = ((n, t * step) for n, t in HfFolder(model).iterate())
        stage_weights(pairs, "disk", version=step, folder=run.weights_dir(step), like=model)
        with files.committed_folder(run.checkpoint_dir(step)):
            pass
    words = ["export", "--run", "r", "--max-shard-size", "30KB", *(["--quantize", quantize] if quantize else [])]
    succeed(*words, "--step", "1", folder=tmp_path)
    shutil.copytree(run.export_dir, tmp_path / "old")
    straight = succeed(*words, folder=tmp_path)
    new, old = contents(run.export_dir), contents(tmp_path / "old")
    assert straight.fsyncs > 2 * KILL_POINTS and new != old
    continued = 0
    for point in range(KILL_POINTS):
        shutil.rmtree(run.export_dir)
        shutil.copytree(tmp_path / "old", run.export_dir)
        kill_at = 1 + (straight.fsyncs - 1) * point // (KILL_POINTS - 1)
        assert slime(*words, folder=tmp_path, kill_at=kill_at).code == -9
        there = {name: data for name, data in contents(run.export_dir).items() if name != partial.JOURNAL}
        assert there in (old, new)
        again = succeed(*words, folder=tmp_path)
        continued += "continuing" in again.err
        assert contents(run.export_dir) == new
        assert not list(run.root.glob("export.*")) and not list(run.root.glob(".export.*"))
    assert continued >= KILL_POINTS // 2


def stop_after(monkeypatch, shards):
    real = partial.Partial.note

    def note(self, number, name):
        real(self, number, name)
        if number == shards:
            raise KeyboardInterrupt

    monkeypatch.setattr(partial.Partial, "note", note)


@pytest.mark.parametrize("quantize", ["", "fp8"])
def test_each_tensor_in_a_shard_of_its_own_is_gone_on_after(model, tmp_path, monkeypatch, quantize):
    """Also between a weight and its scales."""
    options = {"quantize": quantize, "max_shard_bytes": 1}
    count = export(model, tmp_path / "straight", **options)["shards"]
    straight, read, real = contents(tmp_path / "straight"), [], HfFolder.read
    for shards in (*range(1, count, 6), count):
        out = tmp_path / f"out{shards}"
        with monkeypatch.context() as patch:
            stop_after(patch, shards)
            with pytest.raises(InterruptedRunError, match=r"what was done is kept in .*\.partial\n.*command again"):
                export(model, out, **options)
        assert not out.exists()
        read.clear()
        with monkeypatch.context() as patch:
            patch.setattr(
                HfFolder, "read", lambda self, n: (read.append(n) if self.path == model else None, real(self, n))[1]
            )
            export(model, out, **options)
        assert contents(out) == straight
        assert not out.with_name(f"{out.name}.partial").exists()
    assert sorted(read) == HfFolder(model).names, "all shards were there: the source was read to compare, and not again"


def trainer_checkpoint(model, folder, runs_root):
    run = create_run("r", load_recipe("", ("model.name='quickstart'", "model.source='init'", "sft.steps=0")))
    made = run.checkpoint_dir(1) / "trainer"
    made.mkdir(parents=True)
    save_state(made, {f"weight/{n}": t for n, t in HfFolder(model).iterate()}, 1, 0, 1)
    shutil.copytree(model, run.model_dir)
    return made


def quantised(model, folder, runs_root):
    export(model, folder / "fp8", quantize="fp8")
    return folder / "fp8"


def megatron(model, folder, runs_root):
    hf_to_torch_dist(model, folder / "megatron", jobs=1)
    return folder / "megatron"


@pytest.mark.parametrize("make", [megatron, trainer_checkpoint, quantised])
def test_every_origin_is_gone_on_with(make, model, tmp_path, runs_root, monkeypatch):
    origin = find_origin(make(model, tmp_path, runs_root))
    options = {"max_shard_bytes": 30_000, "card": lambda notes: notes["fingerprint"]}
    export_weights(origin, tmp_path / "straight", **options)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(InterruptedRunError):
            export_weights(origin, tmp_path / "out", **options)
    begun = {n for path in (tmp_path / "out.partial").glob("shard-*") for n in read_header(path)}
    taken = [name for name, _ in origin.weights(begun)]
    assert begun and taken and not begun & set(taken) and begun | set(taken) == set(origin.shapes)
    export_weights(origin, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_stopped_while_shards_get_their_last_names(model, tmp_path, monkeypatch):
    export(model, tmp_path / "straight", max_shard_bytes=100_000)
    real, made = type(tmp_path).replace, []

    def replace(self, target):
        made.append(self.name)
        if len(made) > 1 and self.name.startswith("shard-"):
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "replace", replace)
        with pytest.raises(InterruptedRunError):
            export(model, tmp_path / "out", max_shard_bytes=100_000)
    assert (tmp_path / "out.partial/shard-00002").is_file() and not (tmp_path / "out.partial/shard-00001").exists()
    export(model, tmp_path / "out", max_shard_bytes=100_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_other_options_or_another_source_start_over_and_say_so(model, tmp_path, monkeypatch, capsys):
    mine = tmp_path / "mine"
    shutil.copytree(model, mine)
    for change, said in (
        ({"dtype": "bfloat16"}, "another dtype: starting over"),
        ({"max_shard_bytes": 90_000}, "another max shard size: starting over"),
        ({"source": True}, "another source: starting over"),
    ):
        with monkeypatch.context() as patch:
            stop_after(patch, 2)
            with pytest.raises(InterruptedRunError):
                export(mine, tmp_path / "out", max_shard_bytes=100_000)
        if change.pop("source", False):
            edit_json(mine / "config.json", rope_theta=12345.0)
        capsys.readouterr()
        export(mine, tmp_path / "out", **{"max_shard_bytes": 100_000, **change})
        told = " ".join(capsys.readouterr().err.split())
        assert said in told and "continuing" not in told
        shutil.rmtree(tmp_path / "out")


def test_two_at_a_time_are_refused(model, tmp_path):
    held = partial.Partial(tmp_path / "out", {})
    with pytest.raises(UsageError, match="another `slime export` is writing"):
        export(model, tmp_path / "out")
    held.close()
    export(model, tmp_path / "out")

"""What the hub states of its files, and which of them are taken."""

from slimecli.weights.listing import HubFile, choose
from tests.hub_server import git_blob


def test_hash_of_a_small_file_is_gits(tmp_path):
    (tmp_path / "f").write_bytes(b"hello\n")
    assert git_blob(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"  # `echo hello | git hash-object --stdin`
    assert HubFile("f", 6, git_blob(b"hello\n")).damage(tmp_path / "f") == ""
    assert "git blob" in HubFile("f", 6, git_blob(b"hellx\n")).damage(tmp_path / "f")


def test_default_selection_takes_no_second_copy_only_where_there_is_a_first():
    alone = [HubFile("config.json", 1), HubFile("consolidated.safetensors", 1)]
    assert len(choose(alone, "model", (), ()).wanted) == 2
    assert [f.path for f in choose([*alone, HubFile("model.safetensors", 1)], "model", (), ()).wanted] == [
        "config.json",
        "model.safetensors",
    ]

"""Data sets in the hub's layout, as they lie in a local copy."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from slimecli.data_tools.formats import read_rows
from slimecli.errors import DataError, UsageError

HEAD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# a data set
"""


def write(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"n": values}), path)
    elif path.suffix == ".csv":
        path.write_text("n\n" + "".join(f"{v}\n" for v in values))
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"n": v} for v in values]))
    else:
        path.write_text("".join(json.dumps({"n": v}) + "\n" for v in values))


def values(place):
    return [row["n"] for row in read_rows(str(place))]


@pytest.fixture
def declared(tmp_path):
    (tmp_path / "README.md").write_text(HEAD)
    write(tmp_path / "main" / "train-00001-of-00002.parquet", [3])
    write(tmp_path / "main" / "train-00000-of-00002.parquet", [1, 2])
    write(tmp_path / "main" / "test-00000-of-00001.parquet", [9])
    write(tmp_path / "socratic" / "train-00000-of-00001.parquet", [7])
    return tmp_path


def test_the_readme_says_what_a_split_is(declared):
    assert values(f"{declared}#main/train") == [1, 2, 3]
    assert values(f"{declared}#main/train@[1:3]") == [2, 3]
    assert values(f"{declared}#main") == [1, 2, 3] and values(f"{declared}#main/test") == [9]
    assert values(f"{declared}#socratic") == [7], "its only split"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("", "has several subsets: main, socratic"),
        ("train", "has several subsets"),
        ("mian/train", "no subset 'mian' (did you mean 'main'?)"),
        ("main/dev", "no split 'dev'"),
    ],
)
def test_what_is_not_there_is_named(declared, choice, message):
    with pytest.raises(DataError) as caught:
        values(f"{declared}#{choice}")
    assert message in caught.value.what


def test_names_tell_without_a_readme(tmp_path):
    write(tmp_path / "data" / "train-00000-of-00001.parquet", [1])
    write(tmp_path / "data" / "test-00000-of-00001.parquet", [2])
    write(tmp_path / "dev.csv", [3])
    write(tmp_path / ".cache" / "train.jsonl", [99])
    assert values(tmp_path) == [1] and values(f"{tmp_path}#test") == [2] and values(f"{tmp_path}#validation") == ["3"]


def test_one_file_is_the_training_split_and_folders_are_subsets(tmp_path):
    write(tmp_path / "a" / "contest.jsonl", [1])  # "contest" is no test
    write(tmp_path / "b" / "rows.json", [2])
    assert values(f"{tmp_path}#a") == [1] and values(f"{tmp_path}#b/train") == [2]
    with pytest.raises(DataError, match="several subsets: a, b"):
        values(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no"):
        values(tmp_path / "empty")


def test_broken_tables_name_file_and_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('q,a\n"two\nlines",1\nx,2,3\n')
    with pytest.raises(DataError, match=r"a.csv:4: the row has not as many values as the 2 columns"):
        list(read_rows(str(path)))
    path.write_text("q,a\nx\n")
    with pytest.raises(DataError, match=r"a.csv:2: the row has not as many"):
        list(read_rows(str(path)))
    other = tmp_path / "a.json"
    other.write_text('{"a": 1}')
    with pytest.raises(DataError, match="not a list of objects"):
        list(read_rows(str(other)))
    other.write_text('[{"a": 1},]')
    with pytest.raises(DataError, match=r"a.json:1:1[01]: not valid JSON"):
        list(read_rows(str(other)))
    with pytest.raises(UsageError, match="is on the hub"):
        list(read_rows("hf://a/b"))

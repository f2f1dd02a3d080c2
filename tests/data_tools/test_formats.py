import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from slimecli.data_tools.formats import dump_rows, read_rows
from slimecli.errors import DataError, UsageError


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_blank_lines_bom_and_crlf(tmp_path):
    counts = Counter()
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\r\n   \n{"a": "\xc3\xa9"}')
    assert list(read_rows(path, counts)) == [{"a": 1}, {"a": "é"}]
    assert counts["blank"] == 2


def test_broken_json_names_file_line_column(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n\n{"a": 1, "b" 2}\n')
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert f"{path}:3:14: not valid JSON" in caught.value.what
    assert caught.value.fix and caught.value.exit_code == 4


def test_broken_lines_can_be_collected(tmp_path):
    broken = []
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{\n[1]\n{"a": 2}\n')
    assert list(read_rows(path, on_broken=broken.append)) == [{"a": 1}, {"a": 2}]
    assert [e.what.split(": ")[0] for e in broken] == [f"{path}:2:2", f"{path}:3:1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": "\xff"}\n', "a.jsonl:1:8: not UTF-8 text (byte 0xff)"),
        (b"[1, 2]\n", "a.jsonl:1:1: the line is a JSON list"),
        (b'{"a": "\\ud800"}\n', "surrogate"),
        (b"", "has no rows"),
        (b"\n\n", "has no rows"),
    ],
)
def test_bad_content(tmp_path, content, message):
    path = write(tmp_path / "a.jsonl", content)
    with pytest.raises(DataError, match=".*") as caught:
        list(read_rows(path))
    assert message in caught.value.what


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [("0:2", [0, 1]), ("3:", [3, 4]), (":1", [0]), ("-2:", [3, 4]), ("1:-1", [1, 2, 3]), (":", [0, 1, 2, 3, 4])],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices(tmp_path, bounds, expected, kind):
    rows = [{"i": i} for i in range(5)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_bytes(dump_rows(rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [r["i"] for r in read_rows(f"{path}@[{bounds}]")] == expected


def test_slice_mistakes(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n')
    with pytest.raises(DataError, match="selects no rows"):
        list(read_rows(f"{path}@[5:]"))
    with pytest.raises(UsageError, match="slice"):
        list(read_rows(f"{path}@[0:1:2]"))
    with pytest.raises(UsageError, match="end of the slice"):
        list(read_rows(f"{path}@[0:-]"))


def test_wrong_files(tmp_path):
    with pytest.raises(UsageError, match="no data file"):
        list(read_rows(str(tmp_path / "none.jsonl")))
    with pytest.raises(UsageError, match="unknown data format '.txt'"):
        list(read_rows(write(tmp_path / "a.txt", "a")))
    with pytest.raises(DataError, match="not a readable parquet file"):
        list(read_rows(write(tmp_path / "a.parquet", "PAR1 nonsense")))


def test_dump_is_stable_and_readable(tmp_path):
    assert dump_rows([{"b": "é", "a": 1}]) == dump_rows([{"a": 1, "b": "é"}])
    assert json.loads(dump_rows([{"b": "é"}])) == {"b": "é"}

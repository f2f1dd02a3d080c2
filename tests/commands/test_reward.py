import io
import json
import subprocess
import sys
import types

import pytest

from slimecli import cli
from slimecli.data_tools.formats import dump_rows
from slimecli.data_tools.sources import open_source
from slimecli.types import Sample


def slime(*words):
    return cli.run(["reward", *map(str, words)])


@pytest.fixture
def sums(tmp_path):
    stream = open_source("reasoning_gym:basic_arithmetic", {"extract": "last_number", "operators": ["+"]}, 1)
    path = tmp_path / "sums.jsonl"
    path.write_bytes(dump_rows([next(stream) for _ in range(20)]))
    return path


def samples(*pairs):
    lines = [json.dumps(Sample(index=i, response=r, label=x).to_dict()) for i, (r, x) in enumerate(pairs)]
    return ("\n".join(lines) + "\n").encode()


def feed(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))


def test_list(capsys):
    assert slime("--list") == 0
    assert "reasoning_gym" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["reasoning_gym", "exact", "math", "f1"])
def test_check_passes_on_good_data(sums, capsys, kind):
    assert slime("check", sums, "--type", kind, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["rows"] == 20 and result["latency_ms"]["p50"] > 0


def test_check_limit_and_slice(sums, capsys):
    assert slime("check", f"{sums}@[2:9]", "--limit", 5, "--type", "exact", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1.0", "empty answer scored 1"),
        ("return 0.0", "gold answer below 1"),
        ("state.append(1); return float(bool(sample.response)) + len(state) * 1e-3", "not deterministic"),
        ("return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_check_finds_a_bad_reward(tmp_path, sums, capsys, body, message):
    (tmp_path / "r.py").write_text(f"state = []\n\ndef fn(args, sample, **kw):\n    {body}\n")
    assert slime("check", sums, "--type", f"{tmp_path}/r.py:fn") == 4
    assert message in capsys.readouterr().err


def test_check_finds_wrong_labels(tmp_path, sums, capsys):
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    rows[3]["label"] = "nonsense"
    sums.write_bytes(dump_rows(rows))
    assert slime("check", sums, "--type", "reasoning_gym") == 4
    assert "row 4: 'nonsense' scored 0" in capsys.readouterr().err


def test_check_of_patterns_needs_gold(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_bytes(dump_rows([{"prompt": "p", "label": r"^\d+$"}]))
    assert slime("check", path, "--type", "regex") == 4
    assert "no gold answer" in capsys.readouterr().err
    path.write_bytes(dump_rows([{"prompt": "p", "label": r"^\d+$", "metadata": {"gold": "12"}}]))
    assert slime("check", path, "--type", "regex") == 0


def test_score_keeps_order_and_fills_rewards(monkeypatch, capsys):
    feed(monkeypatch, samples(*((str(i % 3), "1") for i in range(150))))
    assert slime("score", "--type", "exact") == 0
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [s.get("index") for s in out] == list(range(150))
    assert [s["reward"] for s in out] == [float(i % 3 == 1) for i in range(150)]


def test_score_counts_failures(monkeypatch, capsys):
    feed(monkeypatch, samples(("1", "1"), ("1", None)))
    assert slime("score", "--type", "exact") == 6
    taken = capsys.readouterr()
    out = [json.loads(line) for line in taken.out.splitlines()]
    assert out[0]["reward"] == 1.0 and "reward" not in out[1] and "needs a label" in out[1]["metadata"]["failure"]
    assert "1 of 2 samples" in taken.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops\n", "<stdin>:1:2"),
        (b'{"respons": 1}\n', "unknown sample field"),
        (b'{"status": "x"}\n', "not a sample"),
    ],
)
def test_score_refuses_what_is_not_a_sample(monkeypatch, capsys, line, message):
    feed(monkeypatch, line)
    assert slime("score") == 4
    assert message in capsys.readouterr().err


def test_usage(capsys):
    assert slime() == 2 and slime("check") == 2 and slime("score", "none.jsonl") == 2
    assert "check needs a data file" in capsys.readouterr().err


def test_closed_pipe_is_quiet(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(samples(*(("x" * 200, "x") for _ in range(3000))))
    # two commands are enough to build the app, and spare the import of all the others
    code = "from slimecli import cli; cli.COMMANDS = {k: cli.COMMANDS[k] for k in ('reward', 'plan')}; cli.main()"
    command = f'"{sys.executable}" -c "{code}" reward score {path} | head -n 1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    first, status = done.stdout.splitlines()
    assert json.loads(first)["reward"] == 0.0 and status == "0" and "Traceback" not in done.stderr

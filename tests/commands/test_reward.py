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
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))


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
        (b'{"prompt": "1 + 1", "label": "2"}\n', "<stdin>:1:1: not a sample: it has no response to score"),
    ],
)
def test_score_refuses_what_is_not_a_sample(monkeypatch, capsys, line, message):
    feed(monkeypatch, line)
    assert slime("score") == 4
    assert message in capsys.readouterr().err


def test_usage(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    assert slime() == 2 and slime("check") == 2 and slime("score", "none.jsonl") == 2
    assert "check needs a data file" in capsys.readouterr().err
    assert slime("check", "none.jsonl", "--as", "sft") == 2
    assert "--as has no effect on check" in capsys.readouterr().err


def test_closed_pipe_is_quiet(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(samples(*(("x" * 200, "x") for _ in range(3000))))
    # two commands are enough to build the app, and spare the import of all the others
    code = "from slimecli import cli; cli.COMMANDS = {k: cli.COMMANDS[k] for k in ('reward', 'plan')}; cli.main()"
    command = f'"{sys.executable}" -c "{code}" reward score {path} | head -n 1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    first, status = done.stdout.splitlines()
    assert json.loads(first)["reward"] == 0.0 and status == "0" and "Traceback" not in done.stderr


def write(path, *rows):
    path.write_bytes(dump_rows([{"prompt": "p", "metadata": {}, **row} for row in rows]))
    return path


NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
ADD = "def add(a, b):\n    return a + b"
TESTS = {"tests": ["assert add(1, 2) == 3", {"call": "add(2, 2)", "expected": 4}]}


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("math", {"label": "\\frac{1}{2}"}),
        ("math_verify", {"label": "\\frac{1}{2}"}),
        ("deepscaler", {"label": "\\boxed{3}"}),
        ("dapo", {"label": "34"}),
        ("gpqa", {"label": "B"}),
        ("gpqa", {"label": "2", "metadata": {"choices": ["a b", "c d", "e f"]}}),
        ("format", {"label": "5"}),
        ("boxed_exact", {"label": "x"}),
        ("code", {"label": "", "metadata": {**TESTS, "gold": f"```python\n{ADD}\n```"}}),
        ("ifbench", {"label": "", "metadata": {"gold": "a", **NO_COMMA}}),
        ("exact", {"label": "7", "metadata": {"rm_type": "math", "gold": "so \\boxed{7}"}}),
    ],
)  # fmt: skip
def test_check_knows_what_each_scorer_reads(tmp_path, capsys, kind, row):
    assert slime("check", write(tmp_path / "d.jsonl", row), "--type", kind, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    (found,) = result["types"].values()
    assert found["rows"] == 1 and found["mean_score"]["gold"] == 1.0 and found["mean_score"]["empty"] < 1.0
    assert found["latency_ms"].keys() == {"p50", "p90", "p99", "max"}


def test_check_finds_a_program_that_fails_its_tests(tmp_path, capsys):
    row = {"label": "", "metadata": {**TESTS, "gold": ADD.replace("+", "-")}}
    assert slime("check", write(tmp_path / "d.jsonl", row), "--type", "code") == 4
    assert "gold answer below 1" in capsys.readouterr().err


def test_check_tells_types_apart_in_a_table(tmp_path, capsys):
    rows = [{"label": "7"}, {"label": "B", "metadata": {"rm_type": "gpqa"}}, {"label": "8"}]
    assert slime("check", write(tmp_path / "d.jsonl", *rows), "--type", "exact") == 0
    out = capsys.readouterr().out.splitlines()
    assert "p99" in out[0]
    assert [line.split()[:2] for line in out if line.split()[:1] in (["exact"], ["gpqa"])] == [
        ["exact", "2"],
        ["gpqa", "1"],
    ]


def test_check_of_a_mix_wants_the_whole_sum(tmp_path, capsys):
    data = write(tmp_path / "d.jsonl", {"label": "7"})
    mix = ("--type", "mix", "--set", "reward.mix={math = 0.8, format = 0.2}", "--json")
    assert slime("check", data, *mix) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["types"]["mix"]["mean_score"] == {"gold": 1.0, "empty": 0.0, "garbled": 0.2}
    assert slime("check", write(data, {"label": "7", "metadata": {"gold": "7"}}), *mix) == 4


def test_check_of_a_tournament_wants_the_gold_answer_on_top(tmp_path, capsys):
    (tmp_path / "r.py").write_text(
        "def right(args, first, second):\n"
        "    a, b = (s.response == s.label for s in (first, second))\n    return 0.5 if a == b else float(a)\n\n"
        "def longer(args, first, second):\n    return float(len(first.response) > len(second.response))\n"
    )
    data = write(tmp_path / "d.jsonl", {"label": "7"})
    words = ("check", data, "--type", "tournament", "--set", "reward.group=true", "--set")
    assert slime(*words, f"reward.tournament.compare={tmp_path}/r.py:right") == 0
    assert slime(*words, f"reward.tournament.compare={tmp_path}/r.py:longer") == 4
    assert "garbled answer not below the gold one" in capsys.readouterr().err


def test_check_says_what_is_not_set(sums, capsys):
    assert slime("check", sums, "--type", "remote_rm") == 2
    assert "reward.rm_url" in capsys.readouterr().err


def test_samples_on_stdin_need_no_word(monkeypatch, capsys):
    feed(monkeypatch, samples(("1", "1"), ("2", "1")))
    assert slime("--type", "exact") == 0
    assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [1.0, 0.0]
    feed(monkeypatch, b"")
    assert slime("--type", "exact") == 2
    assert "nothing came in" in capsys.readouterr().err


def test_groups_are_scored_together(monkeypatch, capsys, tmp_path):
    (tmp_path / "r.py").write_text(
        "def rank(args, samples):\n    return [i / len(samples) for i, _ in enumerate(samples)]\n"
    )
    lines = [Sample(index=i, group_index=i // 3, response="r").to_json() for i in range(5)]
    feed(monkeypatch, "\n".join(lines).encode())
    assert slime("--type", f"{tmp_path}/r.py:rank", "--set", "reward.group=true") == 0
    rewards = [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]
    assert rewards == [0.0, 1 / 3, 2 / 3, 0.0, 0.5]


def test_scoring_again_mends_failed_scores_and_leaves_failed_answers(monkeypatch, capsys):
    def sample(index, failure):
        return Sample(index=index, response="1", label="1", metadata={"failure": failure}).to_json()

    feed(monkeypatch, f"{sample(0, 'reward: late')}\n{sample(1, 'generation: lost')}\n".encode())
    assert slime("score", "--type", "exact") == 6
    mended, left = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert mended["reward"] == 1.0 and "metadata" not in mended
    assert "reward" not in left and left["metadata"]["failure"] == "generation: lost"


@pytest.mark.parametrize(("limit", "scored"), [(0, 9), (1, 3), (3, 3), (4, 6), (99, 9)])
def test_score_takes_as_many_as_it_is_told_and_no_part_of_a_group(monkeypatch, capsys, limit, scored):
    grouped = [Sample(index=i, group_index=i // 3, response="1", label="1").to_json() for i in range(9)]
    feed(monkeypatch, "\n".join(grouped).encode())
    assert slime("score", "--type", "exact", "--limit", limit) == 0
    taken = capsys.readouterr()
    assert len(taken.out.splitlines()) == scored and f"{scored} samples scored" in taken.err


def test_score_of_single_samples_ends_at_the_limit(monkeypatch, capsys):
    feed(monkeypatch, samples(*(("1", "1"),) * 300))
    assert slime("score", "--type", "exact") == 0, "256 is for check"
    assert len(capsys.readouterr().out.splitlines()) == 300
    feed(monkeypatch, samples(*(("1", "1"),) * 3))
    assert slime("score", "--type", "exact", "--limit", 2) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_no_samples_are_no_success(tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text("\n")
    assert slime("score", tmp_path / "none.jsonl") == 4
    assert "none.jsonl has no samples" in capsys.readouterr().err

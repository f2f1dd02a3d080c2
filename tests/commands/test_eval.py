"""`slime eval` on folders, servers and files; a run's own evaluation is in test_run.py."""

import json

import pytest

from slimecli import cli, files
from slimecli.rundir import open_run
from tests.models import tiny_model
from tests.observe.made_run import make_run

SMALL = ["--set", "rollout.max_response_tokens=6", "--set", "reward.path='tests.tiny_run:even_share'"]


def slime(*words):
    return cli.run(["eval", *map(str, words)])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, and two files of prompts."""
    folder = tmp_path_factory.mktemp("eval")
    tiny_model(folder / "model")
    for name, count in (("a", 4), ("b", 2)):
        rows = [{"prompt": f"{name} {i}?", "label": "x"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def scores(capsys):
    return json.loads(capsys.readouterr().out)


def test_several_sets_with_values_of_their_own(place, capsys):
    table = '{path="%s", n_samples_per_prompt=4, max_response_tokens=3}' % (place / "b.jsonl")
    sets = ["--set", f"eval.sets={{a='{place / 'a.jsonl'}', b={table}}}"]
    assert slime("--model", place / "model", *sets, *SMALL, "--json") == 0
    found = scores(capsys)["sets"]
    assert found["a"]["sampled"]["n"] == 4 and found["b"]["sampled"]["n"] == 8 and found["b"]["greedy"]["n"] == 2
    assert list(found["b"]["sampled"]["pass@k"]) == ["1", "2", "4"]
    spec = found["b"]["sampled"]["spec"]
    assert spec["sampling"]["max_new_tokens"] == 3 and spec["samples_per_prompt"] == 4
    assert found["a"]["sampled"]["spec"]["sampling"]["max_new_tokens"] == 6
    assert spec["prompts"]["count"] == 2 and len(spec["scorer"]["version"]) == 12


@pytest.mark.parametrize("form", ["data", "list"])
def test_named_files(place, capsys, form):
    words = {
        "data": ["--data", f"one={place / 'a.jsonl'}", "--data", place / "b.jsonl"],
        "list": ["--eval-prompt-data", "one", place / "a.jsonl", "two", place / "b.jsonl"],
    }[form]
    assert slime("--model", place / "model", *words, *SMALL, "--set", "eval.greedy=false") == 0
    out = capsys.readouterr().out
    head, *rows = [line.split("\t") for line in out.splitlines()]
    assert {r[0] for r in rows} == {"one", "two" if form == "list" else str(place / "b.jsonl")}
    assert {r[head.index("mode")] for r in rows} == {"sampled"}
    assert slime("--model", place / "model", *words, *SMALL, "--set", "eval.sets.one.n_samples_per_prompt=0") == 2
    assert "eval.sets.one.n_samples_per_prompt" in capsys.readouterr().err, "--set reaches into the named sets"


def test_a_server_scores_like_the_folder_it_serves(place, capsys):
    from slimecli.engines.embedded.engine import EmbeddedEngine
    from slimecli.engines.embedded.server import start_server_thread

    words = ["--data", f"a={place / 'a.jsonl'}", *SMALL, "--json"]
    assert slime("--model", place / "model", *words) == 0
    folder = scores(capsys)["sets"]
    url, stop = start_server_thread(EmbeddedEngine(place / "model", slots=8, max_context=256))
    try:
        assert slime("--model", url, *words) == 0
        assert scores(capsys)["sets"] == folder
    finally:
        stop()
    assert slime("--model", url, *words) == 1
    assert "no connection to the engine" in capsys.readouterr().err


def test_compare_pairs_and_refuses(place, tmp_path, capsys):
    def kept(name, *words):
        assert slime("--model", place / "model", "--data", f"a={place / 'a.jsonl'}", *SMALL, *words, "--json") == 0
        (tmp_path / name).write_text(capsys.readouterr().out)
        return tmp_path / name

    first, again = kept("1.json"), kept("2.json")
    hot = kept("3.json", "--set", "eval.temperature=0.2")
    assert slime("--compare", first, again, "--json") == 0
    rows = scores(capsys)["rows"]
    assert [(r["mode"], r["difference"], r["paired"]) for r in rows] == [("greedy", 0.0, True), ("sampled", 0.0, True)]
    assert slime("--compare", first, hot) == 2
    told = capsys.readouterr()
    assert "a, sampled: sampling.temperature: 1.0 | 0.2" in told.err and not told.out and "--anyway" in told.err
    assert slime("--compare", first, hot, "--anyway") == 0
    told = capsys.readouterr()
    assert "another sampling.temperature" in told.err and told.out.splitlines()[0].startswith("set\tmode\ta\tb\tb - a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say --run NAME, or --model"),
        (("--model", "m"), "which data?"),
        (("--compare", "x", "y", "--model", "m"), "--compare reads"),
        (("--compare", "x", "y", "--set", "seed=1"), "--compare reads"),
        (("--model", "m", "--data", "d", "--anyway"), "--anyway has no effect without --compare"),
        (("--model", "m", "--data", "d", "--step", "0"), "--step has no effect with --model"),
        (("--run", "r", "--recipe", "quickstart"), "--recipe has no effect with --run"),
        (("--model", "m", "--data", "a=x", "--data", "a=y"), "--data names 'a' twice"),
        (("--compare", "x", "y"), "neither a file nor a run: x"),
        (("--model", "m", "--eval-prompt-data", "a", "b", "c"), "pairs of a name and a path, and got: a b c"),
        (("--model", "m", "--set", "eval.sets={x={path='f', temp=1}}"), "unknown key `eval.sets.x.temp`"),
        (("--model", "m", "--set", "eval.sets={x=3}"), "a set is a data file, or a table"),
    ],
)
def test_wrong_command_lines(words, message, capsys):
    assert slime(*words) == 2
    assert message in capsys.readouterr().err


def test_scores_of_different_specs_are_not_one_curve(runs_root, capsys):
    """Not in the summary, the report, the list of runs or the model card."""
    from slimecli.observe.records import read_run
    from slimecli.observe.report import render_report
    from slimecli.observe.summary import summarise
    from slimecli.weights.card import _scores

    run = make_run(runs_root / "r", steps=4)
    for step, spec in ((0, "aaaa"), (4, "bbbb")):
        record = files.read_json(run.eval_path(step))
        record["sets"]["holdout"]["sampled"] = {**record["sets"]["holdout"]["sampled"], "spec_hash": spec}
        files.write_json(run.eval_path(step), record)
    records = read_run(run)
    assert records.eval_series("holdout", "sampled") == [(4, 0.9)]
    assert records.eval_series("holdout", "greedy") == [(0, 0.2), (4, 0.9)]
    data = summarise(run)
    assert data["accuracy"]["holdout"]["sampled"] == (0.9, 0.9) and len(data["not_compared"]) == 1
    assert "slime eval --compare RUN@0 RUN@4" in data["not_compared"][0]
    assert data["not_compared"][0].split(";")[0] in render_report(run)
    assert "| holdout | sampled |  | 0.9000 |" in _scores(run, 4)
    assert "| holdout | greedy | 0.2000 | 0.9000 |" in _scores(run, 4)
    run.append(run.metrics_path, {"step": 5, "eval/holdout/sampled": 0.9})
    assert cli.run(["watch", "r"]) in (0, 6)
    told = capsys.readouterr().err
    assert told.count("was measured with another spec") == 1
    assert cli.run(["runs", "--json"]) == 0
    assert scores(capsys)[0]["spec"] == "bbbb" and open_run("r").eval_steps() == [0, 4]

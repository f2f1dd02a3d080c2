"""`slime rollout` and `slime reward` as filters of prompts and samples: order, shards, kills, forms, pipes."""

import gc
import json
import time

import pytest

from slimecli import cli
from tests.forked import slime, succeed
from tests.models import tiny_model

SETS = ("rollout.n_samples_per_prompt=3", "rollout.batch_size=2", "rollout.max_response_tokens=4", "seed=4")
REWARD = ("reward.path='tests.tiny_run:even_share'",)
ROWS = 9


def words(*extra, sets=()):
    return ["rollout", "--model", "model", *[w for s in (*SETS, *REWARD, *sets) for w in ("--set", s)], *extra]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline")
    tiny_model(folder / "model")
    rows = [{"prompt": f"What is {i} + 3?", "label": str(i + 3), "metadata": {"n": i}} for i in range(ROWS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def whole(place):
    """All answers, from stdin to stdout."""
    return succeed(*words(), folder=place, run=lambda *a, folder: slime(*a, folder=folder, stdin=prompts(place))).out


def prompts(place):
    return (place / "prompts.jsonl").read_bytes()


def test_stdin_to_stdout_in_order(place, whole):
    samples = [json.loads(line) for line in whole.splitlines()]
    assert [s["group_index"] for s in samples] == [i for i in range(ROWS) for _ in range(3)]
    assert [s["index"] for s in samples] == list(range(3 * ROWS))
    assert all(len(s["rollout_log_probs"]) == s["response_length"] and s["reward"] is not None for s in samples)
    assert samples[0]["metadata"] == {"n": 0, "prompt_messages": [{"role": "user", "content": "What is 0 + 3?"}]}
    assert len({s["response"] for s in samples}) > ROWS, "seeds differ within a prompt"


def test_a_file_gives_the_same_and_shards_are_its_parts(place, whole):
    out = [succeed(*words("--prompts", "prompts.jsonl", "--shard", f"{i}/2"), folder=place).out for i in (1, 2)]
    parts = [line for text in out for line in text.splitlines()]
    assert sorted(parts, key=lambda line: json.loads(line)["index"]) == whole.splitlines()
    assert {json.loads(line)["group_index"] % 2 for line in out[0].splitlines()} == {0}


def test_every_kill_leaves_a_file_that_is_continued_exactly_once(place, whole, monkeypatch):
    """Killed at each durable write in turn, until one attempt comes to its end."""
    monkeypatch.setattr("slimecli.rollout.appended.COMMIT_S", 0.0)  # a commit after every prompt
    call = words("--prompts", "prompts.jsonl@[0:5]", "--out", "killed.jsonl", "--json")
    whole = "".join(line + "\n" for line in whole.splitlines()[:15])
    out, attempts = place / "killed.jsonl", 0
    while True:
        attempts += 1
        ended = slime(*call, folder=place, kill_at=4 + attempts % 3)  # a commit is three durable writes
        if ended.code == 0:
            break
        assert ended.code == -9 and attempts < 12
        with out.open("a") as handle:
            handle.write('{"torn": ')  # beyond the last commit, as a kill in mid-write leaves it
    assert attempts > 3
    assert out.read_text() == whole
    assert json.loads(ended.out)["resumed_at"] > 0 and json.loads(ended.out)["samples"] == 15
    again = succeed(*call, folder=place)
    assert json.loads(again.out)["resumed_at"] == 5 and out.read_text() == whole, "complete: nothing is done twice"


def test_a_begun_file_is_not_mixed_with_another(place):
    (place / "foreign.jsonl").write_text("{}\n")
    call = words("--prompts", "prompts.jsonl@[0:2]", "--out", "begun.jsonl")
    succeed(*call, folder=place)
    begun = (place / "begun.jsonl").read_bytes()
    for extra, told in (
        (words("--prompts", "prompts.jsonl@[0:2]", "--out", "foreign.jsonl"), "was not begun by slime rollout"),
        (words("--prompts", "prompts.jsonl@[0:2]", "--out", "begun.jsonl", sets=("seed=5",)), "seed: 4, now 5"),
        (
            words("--prompts", "prompts.jsonl@[1:3]", "--out", "begun.jsonl"),
            "not those that begun.jsonl was begun with",
        ),
        (
            words("--prompts", "prompts.jsonl@[0:1]", "--out", "begun.jsonl"),
            "not those that begun.jsonl was begun with",
        ),
        (words("--prompts", "prompts.jsonl", "--shard", "3/2"), "is not i/n"),
        (words("--prompts", "prompts.jsonl", "--as", "sfd"), "did you mean 'sft'?"),
        (words("--prompts", "prompts.jsonl", "--as", "sft:best=0"), "no rule 'best=0'"),
        (words("--prompts", "prompts.jsonl", "--as", "samples:min=nan"), "no rule 'min=nan'"),
        (words("--prompts", "prompts.jsonl", "--out", "."), ". is a folder"),
        (
            ["rollout", "--run", "q", "--prompts", "prompts.jsonl", "--shard", "1/2"],
            "--prompts and --shard have no effect",
        ),
    ):
        ended = slime(*extra, folder=place)
        assert ended.code == 2 and told in ended.err, ended.err
    assert (place / "begun.jsonl").read_bytes() == begun
    more = words("--prompts", "prompts.jsonl@[0:3]", "--out", "begun.jsonl", "--json")
    assert json.loads(succeed(*more, folder=place).out)["prompts"] == 3, "prompts that came later are added"


def test_answers_of_other_weights_or_other_code_are_not_appended(tmp_path):
    """Weights that were trained further have the same names and sizes."""
    tiny_model(tmp_path / "model")
    rows = "".join(json.dumps({"prompt": f"What is {i}?", "label": "x"}) + "\n" for i in range(2))
    (tmp_path / "prompts.jsonl").write_text(rows)
    (tmp_path / "own.py").write_text("def score(args, sample, **kwargs):\n    return 1.0\n")
    call = words("--prompts", "prompts.jsonl", "--out", "o.jsonl", sets=("reward.path=own.py:score",))
    succeed(*call, folder=tmp_path)
    begun = (tmp_path / "o.jsonl").read_bytes()
    for name, told in (("model/model.safetensors", "weights.model.safetensors"), ("own.py", "scorer")):
        path = tmp_path / name
        kept = path.read_bytes()
        path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        ended = slime(*call, folder=tmp_path)
        assert ended.code == 2 and f"begun with other values: {told}" in ended.err, ended.err
        path.write_bytes(kept)
    succeed(*call, folder=tmp_path)
    assert (tmp_path / "o.jsonl").read_bytes() == begun


def test_sft_of_the_best_answers(place, whole):
    made = succeed(*words("--prompts", "prompts.jsonl", "--as", "sft:best"), folder=place)
    rows = [json.loads(line) for line in made.out.splitlines()]
    samples = [json.loads(line) for line in whole.splitlines()]
    best = {}
    for sample in samples:
        if sample["status"] == "completed":
            best.setdefault(sample["group_index"], []).append((sample["reward"], -sample["index"], sample["response"]))
    assert {r["metadata"]["group_index"] for r in rows} == best.keys()
    for row in rows:
        user, answer = row["messages"]
        assert user["role"] == "user" and row["metadata"]["n"] == row["metadata"]["group_index"]
        assert (row["metadata"]["reward"], answer["content"]) == max(best[row["metadata"]["group_index"]])[::2]
    truncated = sum(s["status"] == "truncated" for s in samples)
    assert truncated and f"{truncated} left out: truncated" in made.err


def test_scoring_again_gives_the_same_choice(place, whole):
    """`slime rollout | slime reward --as sft:best` is `slime rollout --as sft:best`."""
    sets = [w for s in REWARD for w in ("--set", s)]
    direct = succeed(*words("--prompts", "prompts.jsonl", "--as", "sft:best"), folder=place).out
    unscored = "".join(
        json.dumps({k: v for k, v in json.loads(line).items() if k != "reward"}) + "\n" for line in whole.splitlines()
    )
    again = slime("reward", *sets, "--as", "sft:best", folder=place, stdin=unscored.encode())
    assert again.code == 0 and again.out == direct
    passing = slime("reward", *sets, "--as", "samples:min=0.5", folder=place, stdin=whole.encode())
    kept = [json.loads(line)["reward"] for line in passing.out.splitlines()]
    assert kept and min(kept) >= 0.5 and len(kept) < 3 * ROWS


def test_a_broken_prompt_is_named_after_what_came_before_it(place):
    (place / "bad.jsonl").write_text('{"prompt": "a", "label": "x"}\n{"prompt": "b", "label": "x"}\n{"promt": "c"}\n')
    ended = slime(*words("--prompts", "bad.jsonl"), folder=place)
    assert ended.code == 4 and len(ended.out.splitlines()) == 6 and "bad.jsonl:3: no column 'prompt'" in ended.err
    sets = ("data.skip_broken=true", "rollout.dynamic_filter=zero-variance")
    left = succeed(*words("--prompts", "bad.jsonl", sets=sets), folder=place)
    assert "rollout.dynamic_filter chooses what a run trains on" in left.err, "it is not left out without a word"
    assert len(left.out.splitlines()) == 6 and "1 left out: broken prompt" in left.err
    long = slime(*words("--prompts", "prompts.jsonl", sets=("data.max_prompt_tokens=3",)), folder=place)
    assert long.code == 4 and "prompts.jsonl:1: the prompt has" in long.err


def test_broken_lines_are_left_out_and_counted_once_by_every_shard_and_after_a_kill(place):
    good = '{"prompt": "a", "label": "x"}\n'
    (place / "torn.jsonl").write_text(f"{{torn\n{good}[1]\n{good}{{}}\n{good}{{torn")
    call = words("--prompts", "torn.jsonl", "--json", sets=("data.skip_broken=true",))
    assert slime(*words("--prompts", "torn.jsonl"), folder=place).code == 4, "unless it is told to"
    parts = [json.loads(succeed(*call, "--shard", f"{i}/2", "--out", f"t{i}.jsonl", folder=place).out) for i in (1, 2)]
    assert [part["left"]["broken prompt"] for part in parts] == [3, 1], "lines with the row after them"
    assert sum(part["prompts"] for part in parts) == 3
    while (ended := slime(*call, "--out", "t.jsonl", folder=place, kill_at=5)).code == -9:
        pass
    assert json.loads(ended.out)["left"] == {"broken prompt": 4} and json.loads(ended.out)["prompts"] == 3
    again = json.loads(succeed(*call, "--out", "t.jsonl", folder=place).out)
    assert again["left"] == {"broken prompt": 4}, "and are not counted again"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"promt": "a"}\n{"promt": "b"}\n',
            "every prompt was left out as broken (2 of 2); the first: none.jsonl:1: no",
        ),
        ("{torn\n", "none.jsonl has no rows: what was read is broken; the first: none.jsonl:1:2: not valid JSON"),
        ("\n", "none.jsonl has no rows"),
    ],
)
def test_leaving_every_prompt_out_is_no_success(place, text, expected):
    (place / "none.jsonl").write_text(text)
    ended = slime(*words("--prompts", "none.jsonl", sets=("data.skip_broken=true",)), folder=place)
    assert ended.code == 4 and ended.out == "" and expected in ended.err, ended.err
    call = words("--prompts", "none.jsonl", "--out", "none.out.jsonl", sets=("data.skip_broken=true",))
    assert [slime(*call, folder=place).code for _ in range(2)] == [4, 4], "nor the second time"
    for made in (place / "none.out.jsonl", place / ".none.out.jsonl.progress.json"):
        made.unlink(missing_ok=True)
    with_stdin = slime(*words("--prompts", "-", sets=("data.skip_broken=true",)), folder=place, stdin=text.encode())
    assert with_stdin.code == 4 and expected.replace("none.jsonl", "<stdin>") in with_stdin.err


def test_why_answers_failed_is_told(place):
    sets = ("rollout.max_response_tokens=100000",)
    ended = slime(*words("--prompts", "prompts.jsonl@[0:1]", sets=sets), folder=place)
    assert ended.code == 6 and "3 of 3 answers failed" in ended.err
    assert "; the first: generation: prompt 0 has" in ended.err


def test_a_server_that_is_not_there_or_goes_away_is_told_at_once(place, monkeypatch, capsys, caplog):
    from slimecli.engines.embedded.engine import EmbeddedEngine
    from slimecli.engines.embedded.server import start_server_thread

    monkeypatch.chdir(place)
    sets = [w for s in (*SETS, *REWARD, "model.path=model") for w in ("--set", s)]
    call = ["rollout", "--prompts", "prompts.jsonl", *sets]
    begin = time.monotonic()
    assert cli.run([*call, "--model", "http://127.0.0.1:9"]) == 1
    assert time.monotonic() - begin < 60, "not waited for, as an engine is that will be started again"
    assert "no connection to the engine at http://127.0.0.1:9" in capsys.readouterr().err
    url, stop = start_server_thread(EmbeddedEngine(place / "model", slots=2, max_context=256))
    (place / "ends.py").write_text(ENDS)
    monkeypatch.setattr("tests.commands.test_rollout_offline.STOP", stop)
    own = ("rollout.custom_generate=ends.py:generate", "engine.on_failure=stop")
    call += [w for s in own for w in ("--set", s)]
    assert cli.run([*call, "--model", url, "--out", "left.jsonl"]) == 1
    gc.collect()
    assert "left.jsonl is continued" in capsys.readouterr().err
    assert "never retrieved" not in caplog.text


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(place, whole, monkeypatch, capsys):
    monkeypatch.chdir(place)
    call = words("--prompts", "prompts.jsonl", "--out", "stopped.jsonl")
    asked = iter(range(3))
    monkeypatch.setattr("slimecli.commands._offline.Shard.has", lambda shard, row: _interrupted_at_the_end(asked))
    assert cli.run(call) == 130
    assert "interrupted" in (told := capsys.readouterr().err) and "stopped.jsonl is continued" in told
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert cli.run(call) == 0
    assert "went on after row" in capsys.readouterr().err
    assert (place / "stopped.jsonl").read_text() == whole


def _interrupted_at_the_end(asked):
    if next(asked, None) is None:
        raise KeyboardInterrupt
    return True


STOP = None
ENDS = """
import asyncio
from tests.commands import test_rollout_offline as test

async def generate(args, sample, sampling_params):
    if sample.index == 0:
        await asyncio.to_thread(test.STOP)
        test.STOP = None
    while test.STOP is not None:
        await asyncio.sleep(0.01)
    if sample.group_index == 0:
        await asyncio.sleep(0.3)  # the group behind fails first, and nobody waits for it
    return await args.engine.generate({"input_ids": sample.tokens, "sampling_params": sampling_params})
"""

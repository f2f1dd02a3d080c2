"""Several sources by weight, files larger than memory, a source of one's own, and a choice among waiting groups."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from slimecli.errors import DataError, SlimeError, UsageError
from slimecli.recipe import load_recipe
from slimecli.rollout.args import HookArgs
from slimecli.rollout.file_rows import FileRows
from slimecli.rollout.open_source import open_source
from slimecli.rollout.own_source import own_source
from slimecli.rollout.source import PromptSource
from slimecli.rundir import RunDir
from slimecli.types import Sample, SampleStatus

NAMES = ["a"] * 20 + ["b"] * 5 + ["c"] * 5


def mixed(mix, seed=3):
    rows = [Sample(prompt=f"{name}{i}", tokens=[i]) for i, name in enumerate(NAMES)]
    return PromptSource(rows, 2, seed=seed, shuffle=True, mix=mix, sources=NAMES)


def drawn(source, n):
    return [g[0].prompt for g in source.take(n)]


def test_sources_come_by_weight_and_each_walks_its_own_epochs():
    source = mixed({"a": 1.0, "b": 2.0, "c": 1.0})
    prompts = drawn(source, 400)
    share = Counter(p[0] for p in prompts)
    assert 160 <= share["b"] <= 240 and 70 <= share["a"] <= 130
    of_b = [p for p in prompts if p[0] == "b"]
    for epoch in range(len(of_b) // 5):
        assert len(set(of_b[5 * epoch : 5 * epoch + 5])) == 5, "each of its rows once before any comes again"
    assert (
        prompts == drawn(mixed({"c": 1.0, "a": 1.0, "b": 2.0}), 400) != drawn(mixed({"a": 1.0, "b": 2, "c": 1}, 4), 400)
    )


def test_a_mix_continues_exactly_through_json():
    straight, resumed = mixed({"a": 1.0, "b": 2.0, "c": 1.0}), mixed({"a": 1.0, "b": 2.0, "c": 1.0})
    straight.give_back(straight.take(33)[-2:])
    resumed.restore(json.loads(json.dumps(straight.state())))
    for _ in range(3):
        resumed.prepare(5)
        assert [[s.to_dict() for s in g] for g in straight.take(9)] == [
            [s.to_dict() for s in g] for g in resumed.take(9)
        ]


def test_a_mix_names_every_source_and_no_other():
    with pytest.raises(DataError, match="c: 5"):
        mixed({"a": 1.0, "b": 1.0})
    with pytest.raises(DataError, match="'d', but no row"):
        mixed({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0})
    other = mixed({"a": 1.0, "b": 1.0, "c": 1.0}).state()
    with pytest.raises(SlimeError, match="data.mix"):
        PromptSource([Sample(tokens=[1])] * 30, 2, seed=3, shuffle=True).restore(other)


def write_rows(run, count):
    run.data_dir.mkdir(parents=True)
    lines = [json.dumps({"prompt": f"p{i}", "metadata": {"source_name": "ab"[i % 2]}}) + "\n" for i in range(count)]
    (run.data_dir / "train.jsonl").write_text("".join(lines[:3]) + "\n" + "".join(lines[3:]))


def load(path, lines=None):
    raw = lines if lines is not None else [x for x in Path(path).read_bytes().split(b"\n") if x]
    rows = [json.loads(x) for x in raw]
    return [Sample(prompt=r["prompt"], tokens=[1], metadata=r["metadata"]) for r in rows]


@pytest.mark.parametrize("words", [(), ("data.mix={a=1.0, b=3.0}",)])
def test_streamed_prompts_are_those_of_the_file_in_memory(tmp_path, words):
    run = RunDir(tmp_path)
    write_rows(run, 50)
    held = open_source(load_recipe("", words), run, load, None)
    streamed = open_source(load_recipe("", ("data.stream=true", *words)), run, load, None)
    for count in (7, 60, 5):
        streamed.prepare(4)
        assert [[s.to_dict() for s in g] for g in held.take(count)] == [
            [s.to_dict() for s in g] for g in streamed.take(count)
        ]
    assert held.state() == streamed.state()


def test_of_a_streamed_file_only_places_are_held(tmp_path):
    path = tmp_path / "big.jsonl"
    with path.open("w") as handle:
        for i in range(2000):
            handle.write(json.dumps({"prompt": f"{i:04d}" + "x" * 2000}) + "\n")
    tracemalloc.start()
    rows = FileRows(path, lambda at, line: Sample(prompt=json.loads(line)["prompt"][:4], tokens=[1]))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 200_000 < path.stat().st_size
    assert len(rows) == 2000 and rows[1234].prompt == "1234" and rows[-1].prompt == "1999"
    assert [r.prompt for r in rows[5:7]] == ["0005", "0006"]
    with pytest.raises(IndexError):
        rows[2000]
    path.write_text("")
    with pytest.raises(DataError, match="became shorter"):
        rows[7]


class Mine:
    """As slime's users write it."""

    def __init__(self, args):
        self.n, self.at, self.saves = args.n_samples_per_prompt, 0, {}

    def get_samples(self, num_samples):
        groups = [[Sample(prompt=f"q{self.at + i}") for _ in range(self.n)] for i in range(num_samples)]
        self.at += num_samples
        return groups

    def save(self, rollout_id):
        SAVED[rollout_id] = self.at

    def load(self, rollout_id):
        self.at = SAVED[rollout_id]


class Stateful(Mine):
    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]


class Short(Mine):
    def get_samples(self, num_samples):
        return super().get_samples(1)


SAVED: dict[int, int] = {}


def own(name):
    args = HookArgs(load_recipe("", ("rollout.n_samples_per_prompt=2",)))
    return own_source(f"{__name__}:{name}", args, 2, lambda text: [len(text), 5])


@pytest.mark.parametrize("name", ["Mine", "Stateful"])
def test_an_own_source_is_numbered_tokenized_and_resumed(name):
    source = own(name)
    groups = source.take(3)
    assert [s.index for g in groups for s in g] == list(range(6)) and groups[2][0].tokens == [2, 5]
    groups[1][0].status, groups[1][0].response_length = SampleStatus.ABORTED, 1
    source.give_back([groups[1]])
    state = json.loads(json.dumps(source.state()))
    source.take(9)
    resumed = own(name)
    resumed.restore(state)
    again = resumed.take(3)
    assert [g[0].prompt for g in again] == ["q1", "q3", "q4"] and [g[0].group_index for g in again] == [1, 3, 4]
    assert again[0][0].status is SampleStatus.ABORTED, "what it was given back is kept, whoever the class is"


def test_what_an_own_source_does_wrong_is_told():
    with pytest.raises(DataError, match="gave 1 of 3 groups"):
        own("Short").take(3)
    with pytest.raises(UsageError, match="no get_samples"):
        own("Counter_like")
    with pytest.raises(DataError, match="another data source"):
        own("Mine").restore(PromptSource([Sample(tokens=[1])], 1, seed=0, shuffle=False).state())


def Counter_like(args):
    return object()


def pick_last(args, rollout_id, buffer, num_samples):
    """Newest first."""
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def keep_all(args, rollout_id, buffer, num_samples):
    return list(buffer[:num_samples])


def test_a_buffer_filter_chooses_what_comes_next(tmp_path):
    run = RunDir(tmp_path)
    write_rows(run, 50)

    def waiting(name):
        words = (f"rollout.buffer_filter={__name__}:{name}", "data.shuffle=false")
        source = open_source(load_recipe("", words), run, load, None)
        source.give_back(source.take(5))
        return source

    source = waiting("pick_last")
    assert [g[0].group_index for g in source.take(2)] == [4, 3]
    assert [g[0].group_index for g in source.take(4)] == [2, 1, 0, 5]
    with pytest.raises(SlimeError, match="take what is returned out of the buffer"):
        waiting("keep_all").take(2)

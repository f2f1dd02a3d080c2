import json

import pytest

from slimecli.errors import DataError, MissingStageError, UsageError
from slimecli.rollout.comparison import compare, load_scores
from tests.observe.made_run import make_run


def result(scores, **spec):
    flat = [x for g in scores for x in g]
    stated = {"prompts": {"sha256": "a", "count": len(scores)}, "seed": 0, "sampling": {"temperature": 1.0}} | spec
    return {"mean": sum(flat) / len(flat), "scores": scores, "spec": stated, "spec_hash": "x"}


def stored(folder, name, **sets):
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"sets": sets}))
    return str(path)


LOW, HIGH = [[0.0], [1.0], [0.0], [0.0]], [[1.0], [1.0], [0.0], [1.0]]


def test_equal_specs_are_paired(tmp_path):
    a = stored(tmp_path, "a", aime={"sampled": result(LOW), "greedy": result(LOW)}, other={"greedy": result(LOW)})
    b = stored(tmp_path, "b", aime={"sampled": result(HIGH)})
    found = compare(a, b)
    (row,) = found["rows"]
    assert row["set"] == "aime" and row["mode"] == "sampled" and row["paired"] and row["prompts"] == 4
    assert row["difference"] == 0.5 and row["stderr"] == pytest.approx((1 / 3 / 4) ** 0.5)
    assert found["only_in"] == {"a": [["aime", "greedy"], ["other", "greedy"]], "b": []}


def test_different_specs_are_refused_with_their_fields(tmp_path):
    a = stored(tmp_path, "a", aime={"sampled": result(LOW)})
    b = stored(tmp_path, "b", aime={"sampled": result(HIGH, seed=4, sampling={"temperature": 0.6, "top_p": 0.9})})
    with pytest.raises(UsageError) as caught:
        compare(a, b)
    assert "aime, sampled: seed: 0 | 4" in caught.value.what
    assert "sampling.temperature: 1.0 | 0.6" in caught.value.what and "sampling.top_p: null | 0.9" in caught.value.what
    (row,) = compare(a, b, anyway=True)["rows"]
    assert row["paired"] and [d[0] for d in row["differs"]] == ["sampling.temperature", "sampling.top_p", "seed"]


def test_other_prompts_are_never_paired(tmp_path):
    a = stored(tmp_path, "a", aime={"sampled": result(LOW)})
    b = stored(tmp_path, "b", aime={"sampled": result(HIGH[:2], prompts={"sha256": "b", "count": 2})})
    (row,) = compare(a, b, anyway=True)["rows"]
    assert not row["paired"] and row["difference"] == pytest.approx(0.75)


def test_one_set_each_needs_no_common_name(tmp_path):
    a = stored(tmp_path, "a", holdout={"greedy": result(LOW)})
    b = stored(tmp_path, "b", **{"data/holdout.jsonl": {"greedy": result(HIGH)}})
    assert compare(a, b)["rows"][0]["difference"] == 0.5
    c = stored(tmp_path, "c", x={"greedy": result(HIGH)}, y={"greedy": result(HIGH)})
    with pytest.raises(UsageError, match="no set in common"):
        compare(a, c)


def test_places(tmp_path, runs_root):
    run = make_run(runs_root / "r", steps=4)
    assert load_scores("r") == (str(run.eval_path(4)), json.loads(run.eval_path(4).read_text())["sets"])
    assert load_scores("r@0")[0] == str(run.eval_path(0))
    with pytest.raises(MissingStageError, match=r"no evaluation of step 2 \(there are: 0, 4\)"):
        load_scores("r@2")
    with pytest.raises(UsageError, match="neither a file nor a run"):
        load_scores("nothing")
    with pytest.raises(UsageError, match="is no step"):
        load_scores("r@last")
    broken = tmp_path / "x.json"
    broken.write_text("[]")
    with pytest.raises(DataError, match="holds no evaluation"):
        load_scores(str(broken))
    with pytest.raises(DataError, match="older slime made it"):
        compare(
            stored(tmp_path, "old", a={"greedy": {"mean": 0.1, "spec": "abcd"}}),
            stored(tmp_path, "new", a={"greedy": result(LOW)}),
        )

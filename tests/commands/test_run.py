"""`slime run`, `rollout`, `train`, `eval`: what a careless user does, and what the shell sees."""

import fcntl
import json
import shutil
import time

import pytest

from slimecli.errors import SlimeError
from slimecli.rundir import RunDir
from tests.forked import slime, succeed
from tests.tiny_run import metrics, sets

RUN = ("run", "--recipe", "quickstart")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished one-step run."""
    folder = tmp_path_factory.mktemp("done")
    outcome = succeed(*RUN, "--run", "r", "--json", *sets("steps=1", "eval.interval=1"), folder=folder)
    return folder, outcome


def test_stdout_is_one_json_document(done):
    _, outcome = done
    result = json.loads(outcome.out)
    assert result["stages"] == dict.fromkeys(["data", "model", "sft", "loop", "export"], "done")


def test_every_step_is_told_and_the_end_says_what_next(done):
    _, outcome = done
    assert "slime report" in outcome.err and "slime serve" in outcome.err
    assert "held-out" in outcome.err or "holdout" in outcome.err


def test_metrics_have_accuracy_before_and_after(done):
    folder, _ = done
    first, last = metrics(folder / "runs" / "r")
    assert {"eval/holdout/sampled", "eval/holdout/greedy"} <= first.keys() & last.keys()
    assert last["weights/fingerprint"]


def test_exported_folder_loads_and_generates_in_transformers(done):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = done
    export = folder / "runs" / "r" / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 2 ="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**ids, max_new_tokens=3).shape[1] > ids["input_ids"].shape[1]


def test_same_name_again_is_refused_with_both_ways_out(done):
    folder, _ = done
    outcome = slime(*RUN, "--run", "r", *sets(), folder=folder)
    assert outcome.code == 2 and "--resume" in outcome.err and "--overwrite" in outcome.err


def test_no_recipe(tmp_path):
    outcome = slime("run", folder=tmp_path)
    assert outcome.code == 2 and "--recipe quickstart" in outcome.err and not (tmp_path / "runs").exists()


def test_all_recipe_errors_at_once_and_nothing_is_made(tmp_path):
    wrong = ["--set", "trainer.lrr=1", "--set", "rollout.batch_size=0", "--set", "algo.kl_type=k9"]
    outcome = slime(*RUN, *wrong, folder=tmp_path)
    assert outcome.code == 2
    assert all(x in outcome.err for x in ("trainer.lr'", "rollout.batch_size", "algo.kl_type", "3 problem"))
    assert not (tmp_path / "runs").exists()


def test_batch_identity_names_the_numbers(tmp_path):
    outcome = slime(*RUN, *sets("trainer.global_batch_size=24"), folder=tmp_path)
    assert outcome.code == 2 and "16" in outcome.err and "24" in outcome.err


def test_a_run_in_use_is_refused(done):
    folder, _ = done
    with (folder / "runs" / "r" / ".lock").open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        outcome = slime("run", "--resume", "--run", "r", "--set", "steps=2", folder=folder)
    assert outcome.code == 1 and "in use" in outcome.err


def test_resume_with_other_data_is_refused(done):
    folder, _ = done
    outcome = slime("run", "--resume", "--run", "r", "--set", "data.count=200", folder=folder)
    assert outcome.code == 2 and "trained steps" in outcome.err


def test_resume_of_nothing(tmp_path):
    outcome = slime("run", "--resume", "--run", "nope", folder=tmp_path)
    assert outcome.code == 2 and "no run at" in outcome.err


def test_resume_without_a_name(tmp_path):
    outcome = slime("run", "--resume", folder=tmp_path)
    assert outcome.code == 2 and "which run?" in outcome.err


def test_train_without_samples_names_the_command(done):
    folder, _ = done
    outcome = slime("train", "--run", "r", folder=folder)
    assert outcome.code == 3 and "slime rollout --run" in outcome.err


def test_rollout_beyond_the_last_step(done):
    folder, _ = done
    outcome = slime("rollout", "--run", "r", folder=folder)
    assert outcome.code == 2 and "complete" in outcome.err


def test_rollout_before_the_model_exists(tmp_path):
    succeed("prepare-data", "--recipe", "quickstart", "--run", "r", *sets(), folder=tmp_path)
    outcome = slime("rollout", "--run", "r", folder=tmp_path)
    assert outcome.code == 3 and "--until model" in outcome.err


def write_reward(folder, body):
    (folder / "mine.py").write_text(f"import time\nasync def score(args, sample, **kw):\n    {body}\n")
    return ("reward.path='mine.py:score'",)


def test_a_reward_that_raises_is_named_and_nothing_is_lost(tmp_path):
    extra = write_reward(tmp_path, "raise KeyError('oops')")
    outcome = slime(*RUN, "--run", "r", *sets("steps=1", *extra), folder=tmp_path)
    assert outcome.code == 1 and "oops" in outcome.err and "Traceback" not in outcome.err
    assert json.loads((tmp_path / "runs/r/error.json").read_text())["exit_code"] == 1
    assert "slime run --resume" in outcome.err


def test_answers_that_failed_are_told_at_the_end(tmp_path):
    body = "assert sample.index != 5, 'no score'\n    return float(sample.index % 4)"
    extra = write_reward(tmp_path, body)
    small = ("steps=1", "sft.steps=2", "data.count=60", *extra)
    outcome = succeed(*RUN, "--run", "r", *sets(*small), folder=tmp_path)
    assert "1 answers failed" in outcome.err
    run = RunDir(tmp_path / "runs" / "r")
    [sample] = [s for g in run.read_samples(1) for s in g if s.status.value == "failed"]
    assert sample.index == 5 and "no score" in sample.metadata["failure"]
    assert metrics(run.root)[-1]["rollout/failed"] == 1.0
    told = slime("eval", "--run", "r", "--set", "rollout.max_failed_fraction=1", folder=tmp_path)
    assert told.code == 6 and "answers failed and are not in the scores" in told.err


def test_a_reward_that_hangs_meets_its_deadline(tmp_path):
    extra = write_reward(tmp_path, "import asyncio; await asyncio.sleep(600)")
    start = time.monotonic()
    outcome = slime(*RUN, "--run", "r", *sets("steps=1", "reward.timeout_s=0.2", *extra), folder=tmp_path)
    assert outcome.code == 1 and "0.2" in outcome.err and "Traceback" not in outcome.err
    assert time.monotonic() - start < 120


def test_a_broken_gate_stops_with_its_own_code_and_keeps_the_step(tmp_path):
    outcome = slime(*RUN, "--run", "r", *sets("steps=2", "gates.max_logprob_gap=1e-12"), folder=tmp_path)
    assert outcome.code == 5 and "logprob" in outcome.err.replace("log-prob", "logprob")
    run = RunDir(tmp_path / "runs" / "r")
    assert run.last_checkpoint() == 1 and len(run.read_records(run.verdicts_path)) == 1


def test_eval_of_a_run_and_of_its_export_agree(done):
    folder, _ = done
    of_run = json.loads(succeed("eval", "--run", "r", "--json", folder=folder).out)["sets"]["holdout"]
    data = "runs/r/data/holdout.jsonl"
    words = ("eval", "--model", "runs/r/export", "--recipe", "quickstart", "--data", data, "--json", *sets())
    of_export = json.loads(succeed(*words, folder=folder).out)["sets"][data]
    assert of_run["greedy"]["mean"] == of_export["greedy"]["mean"]
    in_loop = metrics(folder / "runs" / "r")[-1]
    assert in_loop["eval/holdout/greedy"] == of_run["greedy"]["mean"]
    assert in_loop["eval/holdout/sampled"] == of_run["sampled"]["mean"]


def test_eval_of_a_run_in_use_and_with_other_values(done):
    folder, _ = done
    run = RunDir(folder / "runs" / "r")
    run.eval_path(1).unlink()
    told = succeed("eval", "--run", "r", "--set", "eval.max_prompts=2", folder=folder)
    assert "not stored in the run: it was made with --set" in told.err
    assert not run.eval_path(1).exists(), "values of another recipe are not the run's"
    with run.lock():
        succeed("eval", "--run", "r", folder=folder)
    assert json.loads(run.eval_path(1).read_text())["sets"]["holdout"]["greedy"]["n"] == 16


def test_offline_rollout_is_a_filter(done):
    folder, _ = done
    words = ("rollout", "--model", "runs/r/export", "--recipe", "quickstart", "--prompts", "runs/r/data/holdout.jsonl")
    outcome = succeed(*words, *sets("data.max_prompt_tokens=64"), folder=folder)
    samples = [json.loads(line) for line in outcome.out.splitlines()]
    assert len(samples) == 16 * 4
    assert all(s["response_length"] == len(s["rollout_log_probs"]) and s["tokens"] for s in samples)


def test_a_wrong_prompt_on_stdin_is_named_by_its_line(done):
    folder, _ = done
    stdin = b'{"prompt": "1", "label": "1"}\n\n{"promt": "1"}\n'
    words = ("rollout", "--model", "runs/r/export", "--recipe", "quickstart", "--prompts", "-")
    outcome = slime(*words, *sets("data.max_prompt_tokens=64"), folder=folder, stdin=stdin)
    assert outcome.code == 4 and "<stdin>:3: no column 'prompt'" in outcome.err and "/tmp" not in outcome.err


def test_damaged_samples_are_named_and_collected_anew(done, tmp_path):
    shutil.copytree(done[0] / "runs", tmp_path / "runs", symlinks=True)
    more = ("--run", "r", "--set", "steps=2")
    succeed("rollout", *more, folder=tmp_path)
    path = RunDir(tmp_path / "runs" / "r").samples_path(2)
    path.write_bytes(path.read_bytes()[:-20])
    outcome = slime("train", *more, folder=tmp_path)
    assert outcome.code == 4 and f"{path.name} is damaged" in outcome.err and "remove it" in outcome.err
    path.unlink()
    succeed("rollout", *more, folder=tmp_path)
    succeed("train", *more, folder=tmp_path)


def test_scores_that_cannot_be_stored_are_shown_all_the_same(done, monkeypatch):
    folder, _ = done

    def full(path, data):
        raise SlimeError("the disk is full")

    monkeypatch.setattr("slimecli.files.write_json", full)
    told = succeed("eval", "--run", "r", "--json", folder=folder)
    assert json.loads(told.out)["sets"]["holdout"]["greedy"]["n"] == 16
    assert "not stored in the run: the disk is full" in told.err

import dataclasses
import json

import pytest

from slimecli import plan_machine
from slimecli.errors import RecipeError
from slimecli.model_specs import get_spec
from slimecli.plan import check_recipe, machine_problems, make_plan
from slimecli.plan_checks import count_data, count_rows
from slimecli.plan_machine import Machine, Speed
from slimecli.plan_numbers import engine_bytes, phase_values, time_values, total_of, trainer_bytes
from slimecli.recipe import load_recipe, validate_recipe

MACHINE = Machine(
    cpus=4, memory_bytes=10**11, gpus=0, gpu_memory_bytes=0, disk_free_bytes=10**12, shared_memory_bytes=10**10
)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """The same machine everywhere."""
    monkeypatch.setattr("slimecli.plan.this_machine", lambda folder: MACHINE)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}", "label": "x"}) + "\n" for i in range(40)) + "\n")
    return path


def tree(rows, **sections):
    base = {
        "steps": 10,
        "model": {"name": "qwen3-0.6b"},
        "data": {"train": str(rows)},
        "rollout": {"batch_size": 8, "n_samples_per_prompt": 4, "max_response_tokens": 100},
        "trainer": {"global_batch_size": 32},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values if isinstance(values, dict) else values
    return base


def megatron(processes=1, **arguments):
    return {"trainer": {"backend": "megatron", "processes": processes}, "megatron": arguments}


def problems(rows, **sections):
    with pytest.raises(RecipeError) as caught:
        check_recipe(validate_recipe(tree(rows, **sections)))
    return caught.value.problems


def test_a_good_recipe_has_no_problem(rows):
    check_recipe(validate_recipe(tree(rows)))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"trainer": {"global_batch_size": 48}}, "rollout.batch_size=12, or rollout.n_samples_per_prompt=6"),
        ({"trainer": {"global_batch_size": 16}}, "trainer.steps_per_rollout=2"),
        ({"trainer": {"steps_per_rollout": 2}}, "trainer.global_batch_size=16"),
        ({"trainer": {"processes": 3}}, "nearest: 30 or 33"),
        ({"rollout": {"batch_size": 64}, "trainer": {"global_batch_size": 256}}, "gives 40 training prompts, fewer"),
        ({"data": {"train": "nowhere.jsonl"}}, "there is no such file"),
        ({"data": {"train": "rows.txt"}}, "not a .jsonl or .parquet or .csv or .json file"),
        ({"data": {"source": "reasoning_gym:x", "count": 99}}, "contradict"),
        ({"data": {"count": 39, "holdout": 4}}, "`data.train` has at most 36 rows besides the 4 of data.holdout"),
        ({"data": {"holdout": 35}}, "gives 5 training prompts (40 rows without the 35 of data.holdout), fewer"),
        ({"data": {"holdout": 99}}, "gives 0 training prompts"),
        ({"eval": {"sets": {"mine": "none.jsonl"}}}, "`eval.sets.mine` = 'none.jsonl'"),
        ({"eval": {"interval": 5}}, "nothing to evaluate on"),
        ({"data": {"max_prompt_tokens": 50_000}}, "over the 40960 that qwen3-0.6b was made for"),
        ({"engine": {"max_context": 200}}, "`engine.max_context` = 200 is below"),
        ({"model": {"name": "qwen3-0.7b"}}, "did you mean 'qwen3-1.7b'?"),
        ({"model": {"source": "path"}}, "needs `model.path`"),
        ({"model": {"tokenizer_vocab": 300}}, "only fits new weights"),
        ({"algo": {"name": "grop"}}, "(did you mean 'grpo'?)"),
        ({"reward": {"type": "exakt"}}, "(did you mean 'exact'?)"),
        ({"reward": {"path": "missing.py:score"}}, "there is no file missing.py"),
        ({"reward": {"path": "json:dunps"}}, "defines no 'dunps' (did you mean 'dumps'?)"),
        ({"reward": {"path": "no_such_module_at_all:f"}}, "there is no module no_such_module_at_all"),
        ({"rollout": {"dynamic_filter": "zero-varianse"}}, "(did you mean 'zero-variance'?)"),
        ({"rollout": {"temperature": 0.0}}, "nothing could be learnt"),
        ({"rollout": {"n_samples_per_prompt": 1}, "trainer": {"global_batch_size": 8}}, "needs at least 2"),
        ({"rollout": {"over_sampling_batch_size": 16}}, "no effect without `rollout.dynamic_filter`"),
        ({"trainer": {"warmup_steps": 11}}, "above the run's 10 steps"),
        ({"megatron": {"x": 1}}, "`trainer.backend` is 'fsdp'"),
        ({"trainer": {"bridge": "mbridge"}}, "`trainer.bridge` = 'mbridge' has no effect"),
        ({"sglang": {"x": 1}}, "`engine.backend` is 'embedded'"),
        (megatron(tensor_model_parallel_size=2), "trainer.processes = 1 is not a multiple of TP x PP x CP = 2; 2"),
        (megatron(3, tensor_model_parallel_size=3), "does not divide the 16 query heads; 2 or 4 does"),
        (megatron(3, pipeline_model_parallel_size=3), "decoder-last-pipeline-num-layers 8 leaves equal stages"),
        (megatron(2, expert_model_parallel_size=2), "qwen3-0.6b has no experts"),
        (megatron(**{"tensor-model-paralel-size": 2}), "(did you mean 'tensor-model-parallel-size'?)"),
        (megatron(num_layers=3), "it follows from the model (qwen3-0.6b)"),
        (megatron(lr=3), "the recipe says that in trainer.lr"),
        (megatron(sequence_parallel=1), "it takes true or false"),
        (megatron(tensor_model_parallel_size="two"), "it takes a whole number above 0"),
        (megatron(recompute_granularity="ful"), "it takes one of 'full', 'selective'"),
        (megatron(recompute_granularity="full"), "needs recompute_method ('uniform' or 'block')"),
        (megatron(overlap_param_gather=True), "needs overlap_grad_reduce = true"),
        (megatron(hidden_dropout=0.1), "slime sets 0.0, since log-probs of the engine and the trainer must agree"),
        (megatron(optimizer_cpu_offload=True), "needs a GPU"),
        (megatron(spec="nowhere_at_all:f"), "there is no module nowhere_at_all"),
        (megatron() | {"model": {"name": "glm-5"}}, "has a sparse-attention indexer"),
        (megatron(2, tensor_model_parallel_size=2) | {"model": {"name": "qwen3-30b-a3b"}}, "sequence-parallel = true"),
        ({"engine": {"backend": "sglang", "urls": ["http://h:1"]}, "sglang": {"a": 1}}, "arguments of their own"),
        ({"engine": {"backend": "sglang"}}, "has no SGLang"),
        ({"sync": {"kind": "in_process"}}, "two processes"),
        ({"cluster": {"backend": "local"}, "sync": {"kind": "distributed"}}, "'ray' or `engine.urls`"),
        ({"cluster": {"backend": "local"}, "trainer": {"processes": 2}}, "'local' is one process"),
        ({"engine": {"urls": ["localhost:1"]}}, "not an http:// address"),
        ({"engine": {"router": "builtin"}, "router": {"polcy": 1}}, "no argument of builtin (did you mean 'policy'?)"),
        ({"engine": {"router": "none"}, "router": {"policy": 1}}, "`engine.router` is 'none'"),
        ({"engine": {"router": "sglang"}}, "pip install sglang-router"),
        ({"steps": 0}, "nothing to train"),
        ({"sft": {"steps": 5, "batch_size": 41}}, "40 demonstrations, fewer than sft.batch_size 41"),
    ],
)
def test_each_mistake_is_found_and_says_how_to_mend_it(rows, sections, expected):
    found = problems(rows, **sections)
    assert [p for p in found if expected in p], found


def test_all_mistakes_are_told_at_once(rows):
    wrong = {"trainer": {"global_batch_size": 48}, "algo": {"name": "x"}, "reward": {"path": "a.py:b"}}
    assert len(problems(rows, **wrong, sglang={"a": 1})) == 4


def test_hooks_are_checked_without_running_them(rows, tmp_path):
    hook = tmp_path / "hook.py"
    hook.write_text("raise SystemExit('imported')\nasync def score(args, sample): return 1.0\n")
    check_recipe(validate_recipe(tree(rows, reward={"path": f"{hook}:score"})))
    assert "defines no 'scroe'" in problems(rows, reward={"path": f"{hook}:scroe"})[0]


def test_rows_are_counted_with_slices(rows):
    assert count_rows(str(rows)) == 40
    assert count_rows(f"{rows}@[10:15]") == 5
    assert count_rows(f"{rows}@[:-38]") == 2
    recipe = validate_recipe(tree(rows, data={"train": f"{rows}@[0:20]", "holdout": 4}))
    assert count_data(recipe).train == 16


def test_parquet_rows_are_counted(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"]}), path)
    assert count_rows(str(path)) == 3


def test_the_quickstart_is_planned_with_a_reason_for_each_number():
    plan = make_plan(load_recipe("quickstart"))
    recipe = load_recipe("quickstart")
    answers = recipe.steps * recipe.rollout.batch_size * recipe.rollout.n_samples_per_prompt
    assert plan.value("work", "answers") == answers
    assert plan.value("work", "tokens in all, at most") == answers * recipe.max_context
    assert plan.value("placement", "weight sync") == "shared_memory"
    assert all(v.reason for v in plan.values if v.name != "total")
    json.dumps(plan.to_dict())


def test_memory_follows_from_the_model():
    spec = get_spec("qwen3-0.6b")
    recipe = validate_recipe({"trainer": {"processes": 2}, "algo": {"kl_coef": 0.1}})
    by_name = {v.name: v.value for v in trainer_bytes(recipe, spec, on_gpu=True)}
    assert by_name["weights"] == by_name["gradients"] == by_name["reference model"] == spec.params * 2
    assert by_name["optimizer"] == spec.params * 4
    assert by_name["total"] == sum(v for k, v in by_name.items() if k != "total")
    engine = {v.name: v.value for v in engine_bytes(validate_recipe({"engine": {"slots": 10}}), spec, on_gpu=True)}
    assert engine["KV cache, at most"] == 10 * 2048 * 2 * 28 * 8 * 128 * 2
    without = trainer_bytes(validate_recipe({}), spec, on_gpu=True)
    recomputed = trainer_bytes(validate_recipe({"trainer": {"activation_checkpointing": True}}), spec, on_gpu=True)
    assert total_of(recomputed) < total_of(without)


def test_what_the_machine_cannot_hold_is_a_problem(rows, monkeypatch):
    small = dataclasses.replace(MACHINE, memory_bytes=10**9, disk_free_bytes=10**9)
    monkeypatch.setattr("slimecli.plan.this_machine", lambda folder: small)
    found = problems(rows)
    assert any("of disk, 1 GB are free" in p for p in found)
    assert any("of memory, 1.0 GB are free" in p for p in found)
    assert machine_problems(small, 10**8, 10**8, None) == []


def test_the_memory_of_a_cluster_is_not_this_machines(rows, monkeypatch):
    small = dataclasses.replace(MACHINE, memory_bytes=10**9)
    monkeypatch.setattr("slimecli.plan.this_machine", lambda folder: small)
    assert any("of memory" in p for p in problems(rows))
    joined = make_plan(validate_recipe(tree(rows, cluster={"address": "10.0.0.1:6379"})))
    assert any("a cluster of GPUs" in w for w in joined.warnings)
    assert not any("wait for each other" in w for w in joined.warnings)


def test_arguments_that_need_a_gpu_may_go_to_a_cluster(rows):
    wanted = megatron(2, **{"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0})
    assert any("needs a GPU" in p for p in problems(rows, **wanted))
    check_recipe(validate_recipe(tree(rows, cluster={"address": "10.0.0.1:6379"}, **wanted)))


def test_memory_by_phase_adds_processes_and_copies():
    recipe = validate_recipe({"trainer": {"processes": 2}, "engine": {"replicas": 3}, "algo": {"kl_coef": 0.1}})
    spec = get_spec("qwen3-0.6b")
    trainer, engine = trainer_bytes(recipe, spec, on_gpu=False), engine_bytes(recipe, spec, on_gpu=False)
    one = {v.name: v.value for v in trainer}
    phases = {v.name: v.value for v in phase_values(recipe, spec, trainer, engine, 3)}
    assert list(phases) == ["collect", "learn", "publish"]
    assert phases["learn"] == 2 * one["total"] + 3 * total_of(engine)
    working = one["gradients"] + one["activations, estimated"] + one["logits"]
    assert phases["learn"] - phases["collect"] == 2 * working
    assert phases["publish"] - phases["collect"] == spec.weight_bytes("bfloat16")
    sft_only = validate_recipe({"steps": 0, "sft": {"steps": 5}})
    assert [v.name for v in phase_values(sft_only, spec, trainer, engine, 0)] == ["learn"]


def test_weights_must_fit_into_shared_memory(rows, monkeypatch):
    docker = dataclasses.replace(MACHINE, shared_memory_bytes=64 * 2**20)
    monkeypatch.setattr("slimecli.plan.this_machine", lambda folder: docker)
    assert "/dev/shm has 0.07 GB free" in problems(rows)[0]
    check_recipe(validate_recipe(tree(rows, sync={"kind": "disk"})))


def test_a_small_gpu_is_warned_of(rows, monkeypatch):
    for gigabytes, warned in ((8, True), (200, False)):
        gpu = dataclasses.replace(MACHINE, gpus=2, gpu_memory_bytes=gigabytes * 10**9)
        monkeypatch.setattr("slimecli.plan.this_machine", lambda folder, gpu=gpu: gpu)
        plan = make_plan(validate_recipe(tree(rows)))
        assert any("of GPU memory" in w for w in plan.warnings) == warned


def test_warnings_do_not_stop(rows):
    plan = make_plan(validate_recipe(tree(rows, rollout={"top_p": 0.9}, gates={"action": "warn"})))
    assert any("biased" in w for w in plan.warnings)
    assert any("gates.action" in w for w in plan.warnings)


def test_time_scales_with_steps_and_speed():
    recipe = load_recipe("quickstart")
    spec = get_spec(recipe.model.name)
    slow = time_values(recipe, spec, Speed(device="cpu", train=1e9, decode=1e9))
    fast = time_values(recipe, spec, Speed(device="cpu", train=2e9, decode=2e9))
    assert slow[0].value == pytest.approx(2 * fast[0].value, rel=0.01)
    assert slow[-1].value >= recipe.steps * (slow[0].value + slow[1].value) * 0.99


def test_this_machine_is_seen(tmp_path):
    found = plan_machine.this_machine(tmp_path / "not" / "there" / "yet")
    assert found.cpus >= 1
    assert found.memory_bytes > 10**8
    assert found.disk_free_bytes > 10**6


def test_the_measurement_runs_in_a_child():
    speed = plan_machine.measure(hidden=64, rows=8)
    assert speed.train > 1e6
    assert speed.decode > 1e6


def test_a_model_folder_that_is_not_there_is_one_problem(rows, tmp_path):
    found = problems(rows, model={"source": "path", "path": str(tmp_path / "gone")})
    assert len(found) == 1 and "config.json" in found[0]


def test_a_small_disk_is_told_in_numbers_that_differ_from_zero():
    found = machine_problems(dataclasses.replace(MACHINE, disk_free_bytes=10**6), 0, 2 * 10**6, None)
    assert "0.002 GB of disk, 0.001 GB are free" in found[0]


@pytest.fixture
def model(tmp_path):
    """A whole model folder of two shards, as far as names, sizes and headers tell."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = get_spec("qwen3-0.6b").to_config()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    for name in "ab":
        header = json.dumps({name: {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}).encode()
        (folder / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"12345")
    index = {"weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def of_folder(rows, folder, **model):
    sizes = {"data": {"max_prompt_tokens": 8}, "rollout": {"max_response_tokens": 8}}
    recipe = tree(rows, model={"name": "", "path": str(folder), "source": "path"} | model, **sizes)
    try:
        check_recipe(validate_recipe(recipe))
    except RecipeError as error:
        return error.problems
    return []


def test_a_whole_model_folder_has_no_problem(rows, model):
    assert of_folder(rows, model) == []


def test_a_model_folder_without_a_tokenizer_is_found(rows, model):
    (model / "tokenizer.json").unlink()
    (found,) = of_folder(rows, model)
    assert "there is no tokenizer" in found and str(model) in found
    assert of_folder(rows, model, source="init", tokenizer_vocab=300) == []


def test_cut_off_and_missing_weights_are_found(rows, model):
    first, second = sorted(model.glob("*.safetensors"))
    data = first.read_bytes()
    for size, told in (
        (len(data) - 1, f"{first} has {len(data) - 1} bytes, its header tells of {len(data)}"),
        (6, "6 bytes do not hold"),
    ):
        first.write_bytes(data[:size])
        assert told in "".join(of_folder(rows, model))
    first.write_bytes(data)
    second.unlink()
    assert f"missing shard(s) {second.name}" in "".join(of_folder(rows, model))
    assert of_folder(rows, model, source="init") == []


@pytest.mark.parametrize(("kind", "copies"), [("shared_memory", 0), ("disk", 2), ("disk_delta", 3)])
def test_weights_on_their_way_take_room_on_the_disk(rows, kind, copies):
    plan = make_plan(validate_recipe(tree(rows, sync={"kind": kind})))
    found = {v.name: v.value for v in plan.values if v.group == "disk"}
    assert found.get("weights on their way", 0) == copies * found["model and export"] / 2


@pytest.mark.parametrize("kind", ["shared_memory", "tensor"])
def test_memory_of_this_machine_does_not_reach_engines_elsewhere(rows, kind):
    check_recipe(validate_recipe(tree(rows, sync={"kind": kind}, engine={"urls": ["http://127.0.0.1:9"]})))
    (problem,) = problems(rows, sync={"kind": kind}, engine={"urls": ["http://127.0.0.1:9", "http://far.away:9"]})
    assert f"`sync.kind` = '{kind}' reaches engines of this machine" in problem

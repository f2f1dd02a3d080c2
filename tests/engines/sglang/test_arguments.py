"""What SGLang takes is read from its source, and a recipe becomes its command line."""

import ast
import dataclasses
import itertools
from pathlib import Path

import pytest

from slimecli.engines.sglang import arguments, fields
from slimecli.errors import UsageError
from slimecli.plan_layout import check_sglang
from slimecli.recipe import load_recipe
from slimecli.topology import policy_servers
from tests.engines.sglang.made import overrides

PLACE = arguments.Place(host="127.0.0.1", port=5, nccl_port=6, index=70)


def recipe(python, *more):
    return load_recipe("", overrides(python, *more))


def test_arguments_are_read_in_every_form(made_up):
    found = fields.installation(str(made_up))
    known = fields.known_arguments(found.folder)
    assert {"stat_loggers", "_internal", "hidden", "plain", "not_an_argument"}.isdisjoint(known)
    assert known["tp_size"].aliases == ("tensor_parallel_size",) and known["tp_size"].flag == "--tp-size"
    assert known["fp8_gemm_runner_backend"].flag == "--fp8-gemm-backend"
    assert ast.unparse(known["mem_fraction_static"].kind) == "Optional[float]"
    switches = {name: a.switch for name, a in known.items() if a.switch}
    assert switches == {
        "offload": "on/off",
        **dict.fromkeys(
            (
                "enable_metrics",
                "enable_dp_attention",
                "enable_memory_saver",
                "disable_overlap_schedule",
                "sleep_on_idle",
            ),
            "on",
        ),
        **dict.fromkeys(("trust_remote_code", "disable_cuda_graph"), "on"),
    }
    assert known["cuda_graph_config"].one_word and not known["encoder_urls"].one_word


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("tp_size=2", ["--tp-size", "2"]),
        ("tensor-parallel-size=2", ["--tp-size", "2"]),
        ("fp8-gemm-backend=x", ["--fp8-gemm-backend", "x"]),
        ("enable-metrics=true", ["--enable-metrics"]),
        ("enable-metrics=false", []),
        ("offload=false", ["--no-offload"]),
        ("encoder_urls=['a', 'b']", ["--encoder-urls", "a", "b"]),
        ("cuda_graph_config={decode = 1}", ["--cuda-graph-config", '{"decode": 1}']),
        ("mem_fraction_static=0.5", ["--mem-fraction-static", "0.5"]),
        ("mem_fraction_static=1", ["--mem-fraction-static", "1"]),
    ],
)
def test_values_as_they_stand_on_the_command_line(made_up, said, words):
    bare = arguments.command_words(recipe(made_up), made_up, PLACE, on_gpu=True)
    given = arguments.command_words(recipe(made_up, f"sglang.{said}"), made_up, PLACE, on_gpu=True)
    assert [w for w in given if w not in bare] == words


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("tp_sise=2", "tp_sise is no argument of the installed SGLang (did you mean 'tp_size'?)"),
        ("tp-sise=2", "did you mean 'tp-size'?"),
        ("port=3", "port: that is said by slime, which takes a free one"),
        ("dtype=float32", "that is said by engine.dtype"),
        ("max-running-requests=3", "that is said by engine.slots"),
        ("tp_size=two", "tp_size = 'two': it takes a whole number"),
        ("tp_size=true", "tp_size = True: it takes a whole number"),
        ("enable_metrics=1", "enable_metrics = 1: it takes true or false"),
    ],
)
def test_wrong_arguments_are_told_by_the_plan(made_up, said, told):
    asked = recipe(made_up, f"sglang.{said}")
    (problem,) = check_sglang(asked, None)
    assert told in problem
    with pytest.raises(UsageError) as error:
        arguments.command_words(asked, made_up, PLACE, on_gpu=True)
    assert told in str(error.value)


def test_arguments_of_one_group_or_model_are_told_by_the_plan(made_up):
    groups = "engine.groups=[{kind='prefill', sglang={tp_size=2}}, {kind='decode', sglang={tp-sise=2}}]"
    models = "engine.models=[{name='t', path='/m', sglang={port=1}}]"
    told = list(check_sglang(recipe(made_up, groups, models, "engine.router=smg"), None))
    assert len(told) == 2 and told[0].startswith("engine.groups[1].sglang tp-sise is no argument"), told
    assert "did you mean 'tp-size'?" in told[0] and told[1].startswith("engine.models[0].sglang port: that is said by")


def test_a_version_that_lacks_what_slime_has_to_say(made_up):
    fields_of = made_up.parent / "site/sglang/srt/arg_groups/fields/parallel.py"
    fields_of.write_text(fields_of.read_text().replace("sleep_on_idle", "sleeps"))
    with pytest.raises(UsageError, match="does not take sleep_on_idle.*slime has to say"):
        arguments.command_words(recipe(made_up), made_up, PLACE, on_gpu=False)
    arguments.command_words(recipe(made_up), made_up, PLACE, on_gpu=True)


def test_an_argument_given_twice(made_up):
    (problem,) = check_sglang(recipe(made_up, "sglang.tp_size=2", "sglang.tensor-parallel-size=2"), None)
    assert "tp_size is given twice" in problem


def test_what_slime_decides(made_up):
    words = arguments.command_words(recipe(made_up, "seed=5"), made_up, PLACE, on_gpu=False)
    pairs = dict(itertools.pairwise(words))
    assert (pairs["--port"], pairs["--nccl-port"], pairs["--random-seed"]) == ("5", "6", "75")
    assert (pairs["--device"], pairs["--dtype"], pairs["--weight-version"]) == ("cpu", "float32", "0")
    assert (pairs["--max-running-requests"], pairs["--max-total-tokens"]) == ("8", str(8 * 512))
    on_gpu = arguments.command_words(recipe(made_up), made_up, PLACE, on_gpu=True)
    assert {"--device", "--max-total-tokens", "--attention-backend"}.isdisjoint(on_gpu)
    assert on_gpu[on_gpu.index("--dtype") + 1] == recipe(made_up).model.dtype
    own = recipe(made_up, "sglang.attention-backend=triton")
    names = [name for name, _, _ in arguments.decided(own, on_gpu=False)]
    assert "attention_backend" not in names and "sampling_backend" in names


def test_a_server_on_several_machines(made_up):
    place = dataclasses.replace(PLACE, machines=2, rank=1, meeting="10.0.0.1:20100")
    words = arguments.command_words(recipe(made_up), made_up, place, on_gpu=True)
    pairs = dict(itertools.pairwise(words))
    assert (pairs["--nnodes"], pairs["--node-rank"], pairs["--dist-init-addr"]) == ("2", "1", "10.0.0.1:20100")
    (told,) = arguments.problems_of(recipe(made_up, "sglang.nnodes=2"))
    assert "said by cluster.gpus_per_machine" in told


def test_docs_name_all_that_the_recipe_says():
    page = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text(encoding="utf-8")
    assert [name for name in arguments.OWNED if f"`{name}`" not in page] == []


def test_copies_of_a_model_within_a_server_are_refused(made_up):
    (told,) = arguments.problems_of(recipe(made_up, "sglang.data-parallel-size=2"))
    assert "[sglang] dp_size = 2" in told and "replicas" in told
    groups = "engine.groups=[{replicas=1, sglang={dp_size=4}}, {replicas=1}]"
    (told,) = arguments.problems_of(recipe(made_up, groups))
    assert "engine.groups[0].sglang dp_size = 4" in told
    assert not arguments.problems_of(recipe(made_up, "sglang.dp_size=2", "sglang.enable_dp_attention=true"))
    assert not arguments.problems_of(recipe(made_up, "sglang.dp_size=1"))


def test_caches_between_servers_go_over_tcp_without_a_gpu(made_up):
    def said(kind, on_gpu, *more):
        own = recipe(made_up, f"sglang.disaggregation_mode={kind}", *more)
        pairs = dict(itertools.pairwise(arguments.command_words(own, made_up, PLACE, on_gpu=on_gpu)))
        return [pairs.get(f"--disaggregation-{n}") for n in ("mode", "transfer-backend", "decode-retraction-backup")]

    assert said("prefill", False) == ["prefill", "mooncake_tcp", None]
    assert said("decode", False) == ["decode", "mooncake_tcp", "cpu_tensor"]
    assert said("decode", False, "sglang.disaggregation-transfer-backend=fake") == ["decode", "fake", "cpu_tensor"]
    assert said("decode", True) == ["decode", None, None], "SGLang's own choice"


def test_memory_is_given_up_only_where_gpus_are_shared(made_up):
    colocated = recipe(made_up, "cluster.placement=colocated")
    assert "--enable-memory-saver" in arguments.command_words(colocated, made_up, PLACE, on_gpu=True)
    assert "--enable-memory-saver" not in arguments.command_words(colocated, made_up, PLACE, on_gpu=False)
    assert "--enable-memory-saver" not in arguments.command_words(recipe(made_up), made_up, PLACE, on_gpu=True)


@pytest.mark.parametrize("script", ["#!/bin/true", "#!/bin/echo 1", "no program"])
def test_a_file_that_is_no_python(tmp_path, script):
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o755)
    (problem,) = check_sglang(recipe(python), None)
    assert "is no Python that answers" in problem and "bootstrap.py sglang" in problem


def test_an_interpreter_is_found_from_the_current_folder(made_up, monkeypatch):
    monkeypatch.chdir(made_up.parent)
    relative = recipe(made_up.name)  # as documented: .venv-sglang/bin/python
    assert not list(check_sglang(relative, None))
    assert fields.installation(made_up.name).python == str(made_up)
    (server,) = policy_servers(relative)
    assert server.recipe.engine.python == str(made_up)


def test_an_environment_without_sglang(tmp_path):
    import sys

    (problem,) = check_sglang(recipe(tmp_path / "none"), None)
    assert "there is no such file" in problem and "bootstrap.py sglang" in problem
    (problem,) = check_sglang(recipe(sys.executable), None)
    assert "has no SGLang" in problem


def test_a_way_of_sync_that_does_not_reach(made_up):
    (problem,) = check_sglang(recipe(made_up, "sync.kind=in_process"), None)
    assert "in_process" in problem


def test_which_way_weights_go(made_up):
    assert recipe(made_up).sync_kind("local") == recipe(made_up).sync_kind("ray") == "disk"
    assert recipe(made_up, "sync.kind=distributed").sync_kind("local") == "distributed"


@pytest.mark.sglang
def test_the_reading_equals_sglangs_own_parser(sglang_python):
    """Every flag of `launch_server --help`, and none that SGLang has not."""
    import re
    import subprocess

    from slimecli import env
    from slimecli.engines.sglang.launch import HERE

    found = fields.installation(str(sglang_python))
    process = subprocess.Popen(
        [str(sglang_python), str(HERE / "cpu.py"), "--help"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env=env.engine_env(1, SGLANG_USE_CPU_ENGINE="1", COLUMNS="200"),
    )  # fmt: skip
    # the pipe stays open: its end would be the end of the process
    process.stdin.write("\n")
    process.stdin.flush()
    told = process.stdout.read()
    process.stdin.close()
    assert process.wait(60) == 0
    usage = told.partition("options:")[0]
    theirs = {fields.argument_name(word) for word in re.findall(r"--[a-z0-9][\w-]+", usage)}
    ours = {name for a in fields.known_arguments(found.folder).values() for name in (fields.argument_name(a.flag),)}
    off = {
        f"no_{fields.argument_name(a.flag)}"
        for a in fields.known_arguments(found.folder).values()
        if a.switch == "on/off"
    }
    assert len(theirs) > 400
    hidden = {"forward_pass_metrics_worker_id", "forward_pass_metrics_ipc_name"}  # its help does not show them
    assert theirs - ours - off == set() and ours - theirs == hidden

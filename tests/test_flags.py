import pytest

from slimecli.errors import UsageError
from slimecli.flags import expand_eval_data, expand_ray_address, expand_sglang, megatron_overrides
from slimecli.recipe import load_recipe


def test_flags_become_values_of_the_megatron_table():
    words = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--lr-mult=-0.5", "--a", "[1, 2]", "--b", "x"]
    recipe = load_recipe("", megatron_overrides(words))
    assert recipe.megatron == {
        "tensor-model-parallel-size": 2,
        "sequence-parallel": True,
        "lr-mult": -0.5,
        "a": [1, 2],
        "b": "x",
    }
    assert megatron_overrides([]) == ()


def test_the_later_of_two_spellings_stands():
    """What follows `--` replaces the recipe's own argument, and never stands beside it."""
    before = ("megatron.tensor_model_parallel_size=2", "megatron.sequence-parallel=true", "sglang.tp_size=1")
    words = ["--tensor-model-parallel-size", "4", "--sequence_parallel", "false"]
    recipe = load_recipe("", (*before, *megatron_overrides(words), "sglang.tp-size=2"))
    assert recipe.megatron == {"tensor-model-parallel-size": 4, "sequence_parallel": False}
    assert recipe.sglang == {"tp-size": 2}


@pytest.mark.parametrize(
    ("words", "told"),
    [(["2"], "'2' is no option"), (["--"], "no option"), (["--a", "1", "2"], "--a has 2 values: 1 2")],
)
def test_what_is_no_flag_is_refused(words, told):
    with pytest.raises(UsageError, match=told):
        megatron_overrides(words)


def test_lists_of_eval_sets_become_one_override():
    words = ["run", "--eval-prompt-data", "aime", "a b.jsonl", "gsm8k", "g.jsonl@[0:9]", "--run", "r"]
    made = expand_eval_data(words)
    assert made[0] == "run" and made[-2:] == ["--run", "r"] and made[1] == "--set"
    sets = load_recipe("", (made[2],)).eval.sets
    assert {k: v.path for k, v in sets.items()} == {"aime": "a b.jsonl", "gsm8k": "g.jsonl@[0:9]"}
    one = load_recipe("", (expand_eval_data(["eval", "--eval-prompt-data", "d/aime.jsonl@[0:3]"])[2],)).eval.sets
    assert {k: v.path for k, v in one.items()} == {"aime": "d/aime.jsonl@[0:3]"}
    assert expand_eval_data(["eval", "--run", "r"]) == ["eval", "--run", "r"]


@pytest.mark.parametrize("words", [["--ray-address", "auto"], ["--ray-address=auto"]])
def test_an_address_of_ray_is_two_values_of_the_cluster_section(words):
    expanded = expand_ray_address(["run", *words, "--resume", "--", "--ray-address", "x"])
    assert expanded[0] == "run" and expanded[5:] == ["--resume", "--", "--ray-address", "x"]
    cluster = load_recipe("", (expanded[2], expanded[4])).cluster
    assert (cluster.address, cluster.backend) == ("auto", "ray")


@pytest.mark.parametrize("words", [["--ray-address"], ["--ray-address", "--resume"], ["--ray-address="]])
def test_an_address_that_is_missing_is_said(words):
    with pytest.raises(UsageError, match="needs an address"):
        expand_ray_address(words)


def test_flags_of_the_router_go_into_its_table():
    words = ["run", "--router-policy", "round_robin", "--sglang-router-retry-max-retries=2", "--sglang-tp", "2", "--x"]
    made = expand_sglang([*words, "--", "--router-policy", "megatron's"])
    assert made[:1] + made[7:] == ["run", "--x", "--", "--router-policy", "megatron's"]
    recipe = load_recipe("", tuple(made[2:7:2]))
    assert recipe.router == {"policy": "round_robin", "retry-max-retries": 2} and recipe.sglang == {"tp": 2}


def test_sglangs_flags_become_values_of_the_sglang_table():
    words = ["run", "--sglang-tp-size", "2", "--sglang-enable-metrics", "--sglang-urls", "a", "b", "--run", "r"]
    assert expand_sglang(words) == [
        *("run", "--set", "sglang.tp-size=2", "--set", "sglang.enable-metrics=true"),
        *("--set", 'sglang.urls=["a", "b"]', "--run", "r"),
    ]
    assert expand_sglang(["--sglang-x=-1"]) == ["--set", "sglang.x=-1"]
    assert load_recipe("", tuple(expand_sglang(["--sglang-urls", "a", "b"])[1:])).sglang == {"urls": ["a", "b"]}


def test_what_is_not_a_servers_flag_is_left_alone():
    words = ["--model", "m", "--", "--sglang-tp-size", "2"]
    assert expand_sglang(words) == words

"""Files written for slime, loaded and run unmodified. The plugins beside this file are written in slime's style."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from slimecli import compat
from slimecli.data_tools.filters import load_filter
from slimecli.data_tools.hooks import load_hook
from slimecli.data_tools.rewards import load_reward
from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.http import HttpEngine
from slimecli.errors import SlimeError, UsageError
from slimecli.recipe import load_recipe
from slimecli.recipe_reward import RewardSection
from slimecli.rollout.args import HookArgs
from slimecli.rollout.custom import load_generate
from slimecli.rollout.generate import Generator, failure
from slimecli.shim import SURFACE, offered
from slimecli.types import Sample, SampleStatus
from tests.models import tiny_model

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny model behind HTTP: (engine, its tokenizer, its folder)."""
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    own = EmbeddedEngine(folder, slots=8, max_context=256)
    url, stop = start_server_thread(own)
    engine = HttpEngine(url, timeout_s=30)
    yield engine, own.codec.tokenizer, folder
    asyncio.run(engine.close())
    stop()


@pytest.fixture(params=["direct", "http"])
def args(served, request):
    """As a session makes them; `http` without the engine, so that plugins talk to the server by themselves."""
    engine, tokenizer, folder = served
    host, _, port = engine.url.removeprefix("http://").partition(":")
    recipe = load_recipe("", ("rollout.max_response_tokens=16", "reward.type=exact"))
    kept = engine if request.param == "direct" else None
    return HookArgs(recipe, host, int(port), engine=kept, tokenizer=tokenizer, model_dir=str(folder))


def work(args, generate, reward, n=2, label=None, **kwargs):
    generator = Generator(engine=None, reward=reward, args=args, timeout_s=30, custom=generate, **kwargs)
    group = [Sample(group_index=0, index=i, prompt="What is the answer", tokens=[5, 6], label=label) for i in range(n)]
    params = [{"temperature": 1.0, "max_new_tokens": 6, "sampling_seed": i} for i in range(n)]
    done = asyncio.run(generator.group(group, params))
    for sample in done:
        assert sample.status is not SampleStatus.FAILED, failure(sample)
        sample.check()
    return done


def test_a_code_tool_plugin(args):
    generate = load_generate(f"{PLUGINS}/retool_like.py:generate", args.recipe)
    reward = load_reward(RewardSection(path=f"{PLUGINS}/retool_like.py:reward_func", key="score"))
    done = work(args, generate, reward, label='{"ground_truth": "42"}')
    for sample in done:
        assert sample.loss_mask[:6] == [1] * 6
        assert 0 in sample.loss_mask
        assert sample.rollout_log_probs[0] < 0
        assert sample.reward["score"] == pytest.approx(-0.9)  # wrong, and one call of the tool
        assert sample.metadata["reward_info"] == {"pred": ""}
        assert sample.reward["acc"] == 0.0
        assert Sample.from_dict(sample.to_dict()).tokens == sample.tokens
    assert done[0].tokens != done[1].tokens


def test_a_search_plugin(args):
    path = f"{PLUGINS}/search_like.py"
    reward = load_reward(RewardSection(path=f"{path}:reward_func"))
    (one, _) = work(
        args, load_generate(f"{path}:generate", args.recipe), reward, label='{"ground_truth": {"target": ["Paris"]}}'
    )
    assert one.weight_versions == ["0"]
    assert sum(one.loss_mask) == 12
    assert len(one.loss_mask) > 12
    assert one.metadata["evaluation"] is False
    assert 0 <= one.reward <= 1


def test_a_plugin_of_several_agents(args):
    generate = load_generate(f"{PLUGINS}/agents_like.py:generate_with_agents", args.recipe)
    done = work(args, generate, load_reward(RewardSection(type="exact")), label="never said")
    assert len(done) == 6
    assert [s.rollout_id for s in done] == [0, 0, 0, 1, 1, 1]
    assert {s.reward for s in done} == {0.0}
    with pytest.raises(AttributeError):
        _ = args.results_dict  # what a plugin writes to its copy stays there


def test_small_plugins(args):
    path = f"{PLUGINS}/small_hooks.py"
    generate, reward = (
        load_generate(f"{path}:generate", args.recipe),
        load_reward(RewardSection(path=f"{path}:group_reward", group=True, key="score")),
    )
    done = work(args, generate, reward, n=3, group_reward=True)
    assert [s.reward for s in done] == [{"score": float(i)} for i in range(3)]
    assert sorted(s.metadata["seen"] for s in done) == [1, 2, 3]  # args are shared, and can be written to
    assert done[0].metadata["reward_info"] == {"note": "text"}
    keep = load_filter(f"{path}:check_spread")
    keyed = HookArgs(load_recipe("", ("reward.key=score",)))
    assert keep(keyed, done).keep
    verdict = keep(keyed, done[:1] * 2)
    assert (verdict.keep, verdict.reason) == (False, "zero_std_0.0")


def test_what_a_plugin_notes_can_be_recorded(args):
    (one,) = work(args, load_generate(f"{PLUGINS}/small_hooks.py:notes_anything", args.recipe), None, n=1)
    kept = Sample.from_dict(one.to_dict())
    assert kept.metadata == {"seen": ["tensor(3)", "x"], "scores": [0.5, 1.0]}
    assert kept.loss_mask == [1] * kept.response_length
    assert kept.reward == 2.0


def test_numbers_may_be_tensors(args):
    reward = load_reward(RewardSection(path=f"{PLUGINS}/small_hooks.py:tensor_reward"))
    assert asyncio.run(reward(args, Sample())) == 0.5
    assert load_filter(f"{PLUGINS}/small_hooks.py:tensor_verdict")(args, [Sample()]).keep is True


def test_a_buffer_filter_gives_back_the_very_groups():
    pick = load_hook(f"{PLUGINS}/small_hooks.py:newest_first", ("args", "rollout_id", "buffer", "num_samples"))
    groups = [[Sample(index=i)] for i in range(3)]
    buffer = list(groups)
    taken = pick(HookArgs(load_recipe("", ())), None, buffer, 2)
    assert [g is w for g, w in zip(taken, [groups[2], groups[1]], strict=True)] == [True, True]
    assert buffer == [groups[0]]


def test_what_is_not_there_says_so(args):
    hook = load_hook(f"{PLUGINS}/small_hooks.py:wants_too_much", ("args", "sample"))
    with pytest.raises(ImportError, match=r"does not offer slime.backends.megatron_utils .*; it offers .*slime.utils"):
        hook(args, Sample())
    with pytest.raises(
        ImportError, match=r"does not offer slime.utils.types.Sampel \(did you mean 'slime.utils.types.Sample"
    ):
        offered("slime.utils.types", ("Sampel",))


def test_everything_on_the_surface_is_there():
    for name, parts in SURFACE.items():
        module = offered(name, ("*",))
        assert module.__all__ == list(parts)
        for part in parts:
            assert callable(getattr(module, part)), f"{name}.{part}"


def test_nothing_of_slime_stays_in_python():
    load_hook(f"{PLUGINS}/retool_like.py:generate", ("args", "sample", "sampling_params"))
    assert not [name for name in sys.modules if name == "slime" or name.startswith("slime.")]
    assert not [finder for finder in sys.meta_path if isinstance(finder, compat._Finder)]
    assert importlib.util.find_spec("slime") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("slime.utils.types")


def test_other_hooks_are_left_alone(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("def fn(args, sample):\n    import slimecli.types\n    return sample\n")
    fn = load_hook(f"{path}:fn", ("args", "sample"))
    assert vars(sys.modules[fn.__module__])["__builtins__"] is not None
    assert fn.__module__ not in compat.plugins
    sample = Sample()
    assert type(fn(None, sample)) is Sample


def test_a_plugin_whose_neighbour_needs_slime(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slime_test_neighbour.py").write_text("from slime.utils.types import Sample\nKIND = Sample\n")
    (tmp_path / "entry.py").write_text("import slime_test_neighbour as n\n\ndef fn(args, sample):\n    return n.KIND\n")
    assert load_hook(f"{tmp_path}/entry.py:fn", ("args", "sample"))(None, None).Status is SampleStatus


def test_a_plugin_in_a_package_of_the_current_folder(tmp_path, monkeypatch):
    package = tmp_path / "slime_test_examples"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text(
        "from slime.utils.types import Sample\n\ndef fn(args, sample):\n    return Sample.Status\n"
    )
    monkeypatch.chdir(tmp_path)
    for path in ("slime_test_examples.own.fn", "slime_test_examples.own:fn"):
        assert load_hook(path, ("args", "sample"))(None, None) is SampleStatus


def test_a_real_slime_is_not_hidden(tmp_path):
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    for place in ("slime", "slime/utils"):
        (tmp_path / place / "__init__.py").write_text("")
    (tmp_path / "slime" / "utils" / "types.py").write_text("class Sample:\n    real = True\n")
    (tmp_path / "plugin.py").write_text(
        "from slime.utils.types import Sample\n\ndef fn(args, sample):\n"
        "    from slime.utils import types\n    return Sample.real and types.Sample.real\n"
    )
    code = (
        "from slimecli.data_tools.hooks import load_hook\n"
        "assert load_hook('plugin.py:fn', ('args', 'sample'))(None, None) is True\n"
    )
    env_path = f"{tmp_path}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {env_path.split(':')!r}\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_slimes_rules_of_scoring():
    dapo = offered("slime.rollout.rm_hub.math_dapo_utils", ("compute_score",)).compute_score
    assert dapo("so Answer: 42", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert dapo("so 42", "42") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert dapo("so \\boxed{42}", "42", strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "42"}
    assert dapo("so 42", "42", strict_box_verify=True)["pred"] is None
    f1 = offered("slime.rollout.rm_hub.f1", ("f1_score",)).f1_score
    assert f1("the cat sat", "cat") == pytest.approx((2 / 3, 0.5, 1.0))
    assert f1("no", "yes") == (0.0, 0.0, 0.0)
    grade = offered("slime.rollout.rm_hub.math_utils", ("grade_answer_verl",)).grade_answer_verl
    assert grade("\\boxed{\\frac{1}{2}}", "0.5")
    assert not grade("\\boxed{3}", "")


def test_loss_masks_of_conversations(served):
    masks = offered("slime.utils.mask_utils", ("MultiTurnLossMaskGenerator",))
    maker = masks.MultiTurnLossMaskGenerator(served[1], tokenizer_type="qwen")
    chat = [{"role": "user", "content": "What"}, {"role": "assistant", "content": "The answer"}]
    ids, mask = maker.get_loss_mask(chat)
    assert maker.get_text_from_loss_mask(ids, mask)[0].startswith("The answer")
    assert maker.get_response_lengths([mask, [0, 0]]) == [len(mask) - mask.index(1), 0]


def test_a_broken_plugin_is_told_as_any_other(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("from slime.utils.types import Sampel\n")
    with pytest.raises(UsageError, match="cannot be imported: ImportError: .*does not offer"):
        load_hook(f"{path}:fn", ("args",))


def test_args_are_read_only_unless_copied():
    import copy

    args = HookArgs(load_recipe("", ()))
    with pytest.raises(SlimeError, match="in a copy of args"):
        args.mine = 1
    mine = copy.deepcopy(args)
    mine.mine, mine.rollout_batch_size = 1, 7
    assert (mine.mine, mine.rollout_batch_size, args.rollout_batch_size) == (1, 7, 32)
    again = copy.copy(mine)
    again.mine = 2
    assert mine.mine == 1
    assert args.for_plugins() is args.for_plugins()

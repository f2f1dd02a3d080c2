"""`tool_loop`: several turns with tools, from a scripted engine."""

import asyncio
import json
import sys
from collections import Counter

import pytest

from slimecli.data_tools.conversations import render_conversation
from slimecli.data_tools.rewards import load_reward
from slimecli.data_tools.selection import parse_selection
from slimecli.errors import SlimeError
from slimecli.recipe import validate_recipe
from slimecli.recipe_reward import RewardSection
from slimecli.recipe_tools import ToolsSection
from slimecli.rollout.args import HookArgs
from slimecli.rollout.custom import close_generate, load_generate, wants_messages
from slimecli.rollout.generate import Generator
from slimecli.rollout.tool_loop import ToolLoop
from slimecli.rollout.versions import as_prompt, mask_said
from slimecli.types import Sample, SampleStatus
from tests.models import tiny_tokenizer
from tests.rollout.test_turns import DROPS_THINKING

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t['function']['name'] }} {% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(expression):
    return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}</tool_call>"


class Engine:
    """Says the given texts one after another; every token has log-prob -0.25."""

    def __init__(self, tokenizer, *texts, finish="stop"):
        self.tokenizer, self.texts, self.finish, self.asked = tokenizer, list(texts), finish, []

    async def generate(self, payload):
        self.asked.append(payload)
        ids = self.tokenizer(self.texts[len(self.asked) - 1], add_special_tokens=False)["input_ids"]
        room = payload["sampling_params"]["max_new_tokens"]
        finish = "length" if len(ids) > room else self.finish
        out = ids[:room]
        meta = {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-0.25, t, None] for t in out],
            "weight_version": "4",
        }
        return {"text": "", "output_ids": out, "meta_info": meta}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    made.chat_template = TEMPLATE
    return made


def work(tokenizer, *texts, sample=None, finish="stop", tools=None, budget=400, **rollout):
    recipe = validate_recipe(
        {
            "rollout": {"max_response_tokens": 400, "custom_generate": "tool_loop", **rollout},
            "tools": {"use": ["calculator"], **(tools or {})},
        }
    )
    engine = Engine(tokenizer, *texts, finish=finish)
    sample = sample or Sample(group_index=2, index=5, prompt=[{"role": "user", "content": "What is 2 * 21"}])
    loop = ToolLoop(recipe.tools)
    args = HookArgs(recipe, engine=engine, tokenizer=tokenizer)
    params = {"max_new_tokens": budget, "stop_token_ids": [2], "sampling_seed": 11, "temperature": 1.0}
    try:
        return asyncio.run(loop(args, sample, params)), engine
    finally:
        loop.close()


def spoken(sample, tokenizer, trained=1):
    response = sample.tokens[sample.prompt_length :]
    return tokenizer.decode([t for t, m in zip(response, sample.mask, strict=True) if m == trained])


def test_a_call_its_output_and_the_answer_are_one_sample(tokenizer):
    first, last = f"Let me see {call('2 * 21')}<|im_end|>", "It is 42<|im_end|>"
    (sample,), engine = work(tokenizer, first, last)
    assert spoken(sample, tokenizer) == first + last
    assert spoken(sample, tokenizer, 0) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert sample.status is SampleStatus.COMPLETED
    assert sample.rollout_log_probs == [-0.25 * m for m in sample.loss_mask]
    assert sample.weight_versions == ["4"]
    assert sample.metadata["stats"] == {"tool_calls": 1, "tool_errors": 0, "turns": 2, "prefix_breaks": 0}
    assert sample.non_generation_time > 0
    (again,), _ = work(tokenizer, first, last)
    assert again.to_json() == sample.to_json(), "wall time is no part of what is written"
    assert (sample.rollout_id, sample.session_id) == (5, "2-5")
    assert sample.response.endswith("It is 42")
    sample.reward = 1.0
    sample.check()
    # token in, token out: each request begins with what was asked and said before
    one, two = (p["input_ids"] for p in engine.asked)
    assert sample.tokens[: sample.prompt_length] == one
    assert two == sample.tokens[: len(two)]
    assert [p["routing_key"] for p in engine.asked] == ["2-5", "2-5"]
    seeds = [p["sampling_params"]["sampling_seed"] for p in engine.asked]
    assert seeds[0] == 11 != seeds[1]


def test_tools_are_shown_by_the_recipe_or_the_row(tokenizer):
    (sample,), _ = work(tokenizer, "42<|im_end|>")
    assert tokenizer.decode(sample.tokens).startswith("<|im_start|>system\ncalculator <|im_end|>")
    ask = [{"role": "user", "content": "What"}]
    own = {"type": "function", "function": {"name": "calculator", "description": "own words", "parameters": {}}}
    for stated in (["calculator"], [own], [own["function"]]):
        row = Sample(index=0, prompt=ask, metadata={"tools": stated})
        (sample,), _ = work(tokenizer, "42<|im_end|>", sample=row, tools={"use": ["calculator", "python"]})
        assert "calculator <|im_end|>" in tokenizer.decode(sample.tokens)
    with pytest.raises(SlimeError, match="offers a tool 'abacus'"):
        work(tokenizer, "42", sample=Sample(index=0, prompt=ask, metadata={"tools": ["abacus"]}))


def test_offline_a_conversation_becomes_sft_data(tokenizer):
    ask = [{"role": "user", "content": "What is 2 * 21"}]
    row = Sample(index=0, group_index=0, prompt="text", metadata={"prompt_messages": ask})
    (sample,), _ = work(tokenizer, f"{call('2 * 21')}<|im_end|>", "It is 42<|im_end|>", sample=row)
    sample.reward = 1.0
    sft = parse_selection("sft:passing")
    assert sft.pick([sample], None, Counter()) == [sample]
    found = json.loads(sft.line(sample))
    assert found["messages"] == [
        *ask,
        {"role": "assistant", "content": call("2 * 21")},
        {"role": "tool", "name": "calculator", "tool_call_id": "call00000", "content": "42"},
        {"role": "assistant", "content": "It is 42"},
    ]
    assert found["tools"][0]["function"]["name"] == "calculator"
    assert "answer_messages" not in found["metadata"]
    ids, mask = render_conversation(found["messages"], tokenizer, found["tools"])
    assert ids[: len(sample.tokens)] == sample.tokens  # what is learnt from is what was said
    assert mask[sample.prompt_length : len(sample.tokens)] == sample.loss_mask
    earlier = Sample(**{**vars(sample), "metadata": {**sample.metadata, "segment": 0, "segments": 2}})
    left = Counter()
    assert sft.pick([earlier], None, left) == []
    assert left["an earlier segment"] == 1


def test_what_a_tool_said_is_no_answer(tokenizer):
    reward = load_reward(RewardSection(type="exact"))
    right = {"metadata": {"extract": "last_number"}, "label": "42", "prompt": [{"role": "user", "content": "What"}]}
    (silent,), _ = work(tokenizer, f"{call('2 * 21')}<|im_end|>", "<|im_end|>", sample=Sample(index=0, **right))
    (said,), _ = work(tokenizer, f"{call('2 * 21')}<|im_end|>", "42<|im_end|>", sample=Sample(index=0, **right))
    assert "42" in silent.response
    assert [asyncio.run(reward(None, s)) for s in (silent, said)] == [0.0, 1.0]
    assert said.response.endswith("42")


def test_errors_are_told_and_counted(tokenizer):
    texts = [f"{call('1 / 0')}<tool_call>nonsense</tool_call><|im_end|>", "Sorry<|im_end|>"]
    (sample,), _ = work(tokenizer, *texts)
    heard = spoken(sample, tokenizer, 0)
    assert "Error: '1 / 0': division by zero" in heard
    assert "'nonsense' cannot be read" in heard
    assert sample.metadata["stats"]["tool_calls"] == sample.metadata["stats"]["tool_errors"] == 2
    assert sample.status is SampleStatus.COMPLETED


def test_a_call_inside_thinking_is_no_call(tokenizer):
    (sample,), engine = work(tokenizer, f"<think>{call('1')}</think>It is 1<|im_end|>")
    assert len(engine.asked) == 1
    assert sample.metadata["stats"]["tool_calls"] == 0


def test_turns_run_out(tokenizer):
    texts = [f"{call(str(i))}<|im_end|>" for i in range(9)]
    (sample,), engine = work(tokenizer, *texts, tools={"max_turns": 3})
    assert len(engine.asked) == 3
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.metadata["stats"]["tool_calls"] == 2
    assert spoken(sample, tokenizer) == "".join(texts[:3])


def test_the_budget_counts_tool_output(tokenizer):
    texts = [f"{call(str(i))}<|im_end|>" for i in range(9)]
    (sample,), engine = work(tokenizer, *texts, budget=150)
    assert sample.response_length <= 150
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.loss_mask[-1] == 1  # output that nothing was said about is not kept
    rooms = [p["sampling_params"]["max_new_tokens"] for p in engine.asked]
    lengths = [len(p["input_ids"]) for p in engine.asked]
    assert [room + length for room, length in zip(rooms, lengths, strict=True)] == [150 + lengths[0]] * len(rooms)


def test_a_turn_has_a_budget_of_its_own(tokenizer):
    (sample,), engine = work(tokenizer, "x" * 50, tools={"max_turn_tokens": 20})
    assert engine.asked[0]["sampling_params"]["max_new_tokens"] == 20
    assert (sample.response_length, sample.status) == (20, SampleStatus.TRUNCATED)


def test_long_output_is_cut(tokenizer, tmp_path):
    path = tmp_path / "own.py"
    path.write_text('def shout(n: int):\n    """Shouts."""\n    return "a" * n\n')
    text = '<tool_call>{"name": "shout", "arguments": {"n": 100}}</tool_call><|im_end|>'
    (sample,), _ = work(tokenizer, text, "x<|im_end|>", tools={"use": [f"{path}:shout"], "max_output_tokens": 10})
    assert f"{'a' * 10}\n[cut: 90 of 100 tokens left out]" in spoken(sample, tokenizer, 0)


def test_output_of_few_characters_and_many_tokens_is_cut_too(tokenizer, tmp_path):
    path = tmp_path / "own.py"
    path.write_text('def smile(n: int):\n    """Smiles."""\n    return "\U0001f600" * n\n')
    text = '<tool_call>{"name": "smile", "arguments": {"n": 9}}</tool_call><|im_end|>'
    (sample,), _ = work(tokenizer, text, "x<|im_end|>", tools={"use": [f"{path}:smile"], "max_output_tokens": 10})
    assert "[cut: 26 of 36 tokens left out]" in spoken(sample, tokenizer, 0)


def test_calls_are_named_as_mistrals_templates_demand(tokenizer):
    strict = "{% for m in messages if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('9!') }}"
    before, tokenizer.chat_template = tokenizer.chat_template, strict + "{% endfor %}" + TEMPLATE
    try:
        (sample,), _ = work(tokenizer, f"{call('2 * 21')}<|im_end|>", "It is 42<|im_end|>")
    finally:
        tokenizer.chat_template = before
    assert sample.metadata["stats"]["turns"] == 2


def test_a_broken_prefix_makes_segments_or_fails(tokenizer):
    before, tokenizer.chat_template = tokenizer.chat_template, DROPS_THINKING
    texts = [f"<think>hm</think>{call('2 * 21')}<|im_end|>", "It is 42<|im_end|>"]
    try:
        (first, second), engine = work(tokenizer, *texts)
        assert spoken(first, tokenizer) == texts[0]
        assert spoken(second, tokenizer) == texts[1]
        assert second.tokens[: second.prompt_length] == engine.asked[1]["input_ids"]
        assert "hm" not in tokenizer.decode(second.tokens)
        assert first.rollout_id == second.rollout_id == 5
        assert second.metadata["stats"]["prefix_breaks"] == 1
        assert "stats" not in first.metadata
        with pytest.raises(SlimeError, match="turn 2 does not continue what was said"):
            work(tokenizer, *texts, on_prefix_break="error")
    finally:
        tokenizer.chat_template = before


class Interrupted(Engine):
    """Says the texts, but is interrupted after the token counts of `cuts` (by number of the request)."""

    def __init__(self, tokenizer, *texts, cuts):
        super().__init__(tokenizer, *texts)
        self.cuts, self.turn, self.rest, self.requests = cuts, 0, [], 0

    async def generate(self, payload):
        self.asked.append(payload)
        ids = self.rest or self.tokenizer(self.texts[self.turn], add_special_tokens=False)["input_ids"]
        cut = self.cuts.get(self.requests)
        self.requests += 1
        out, self.rest = (ids, []) if cut is None else (ids[:cut], ids[cut:])
        self.turn += cut is None
        meta = {
            "finish_reason": {"type": "stop" if cut is None else "abort"},
            "output_token_logprobs": [[-0.25, t, None] for t in out],
            "weight_version": str(self.requests),
        }
        return {"text": "", "output_ids": out, "meta_info": meta}


def interrupted_work(tokenizer, tmp_path, *, mask=False):
    """Two turns; the first is interrupted once, the second twice. Returns the sample and the tool's calls."""
    path = tmp_path / "counted.py"
    path.write_text('calls = []\n\ndef note(x: int):\n    """Notes."""\n    calls.append(x)\n    return str(x)\n')
    texts = ['<tool_call>{"name": "note", "arguments": {"x": 7}}</tool_call><|im_end|>', "It is 42, I think<|im_end|>"]
    recipe = validate_recipe(
        {
            "rollout": {"max_response_tokens": 400, "custom_generate": "tool_loop"},
            "tools": {"use": [f"{path}:note"]},
        }
    )
    engine = Interrupted(tokenizer, *texts, cuts={0: 5, 2: 0, 3: 4})
    loop = ToolLoop(recipe.tools)
    args = HookArgs(recipe, engine=engine, tokenizer=tokenizer)
    params = {"max_new_tokens": 400, "stop_token_ids": [2]}
    sample = Sample(index=5, group_index=2, prompt=[{"role": "user", "content": "What"}], metadata={"own": 1})
    for _ in range(3):
        (sample,) = asyncio.run(loop(args, sample, params))
        assert (sample.status, sample.response_length) == (SampleStatus.ABORTED, 0)
        sample = Sample.from_dict(json.loads(sample.to_json()))  # as a checkpoint keeps it
        if mask:
            mask_said([sample])
    (sample,) = asyncio.run(loop(args, sample, params))
    return sample, engine, texts, sys.modules[loop._toolbox.tools["note"].call.__closure__[0].cell_contents.__module__]


def test_an_interrupted_answer_is_continued_where_it_was(tokenizer, tmp_path):
    sample, engine, texts, module = interrupted_work(tokenizer, tmp_path)
    assert module.calls == [7]  # the tool is not run again
    assert sample.status is SampleStatus.COMPLETED
    assert spoken(sample, tokenizer) == "".join(texts)
    assert sample.weight_versions == ["1", "2", "4", "5"]
    assert sample.metadata["stats"] == {"tool_calls": 1, "tool_errors": 0, "turns": 2, "prefix_breaks": 0}
    assert sample.metadata["own"] == 1
    assert "unfinished" not in sample.metadata
    assert engine.asked[1]["input_ids"] == sample.tokens[: sample.prompt_length + 5]
    assert [span[0] for span in sample.version_spans] == ["1", "2", "4", "5"]
    assert sum(end - start for _, start, end in sample.version_spans) == sum(sample.loss_mask)


def test_what_was_said_before_an_interruption_can_be_masked(tokenizer, tmp_path):
    sample, *_ = interrupted_work(tokenizer, tmp_path, mask=True)
    last = sample.version_spans[-1]
    assert sum(sample.loss_mask) == last[2] - last[1]
    assert set(sample.loss_mask[last[1] : last[2]]) == {1}


def test_an_interrupted_answer_can_begin_anew(tokenizer):
    (sample,), _ = work(tokenizer, "It is", finish="abort")
    assert (sample.status, sample.weight_versions) == (SampleStatus.ABORTED, ["4"])
    assert sample.prompt == [{"role": "user", "content": "What is 2 * 21"}]
    begun = as_prompt(sample)
    assert "unfinished" not in begun.metadata
    (again,), engine = work(tokenizer, "It is 42<|im_end|>", sample=begun)
    assert len(engine.asked) == 1
    assert spoken(again, tokenizer) == "It is 42<|im_end|>"


def test_a_prompt_that_fills_the_context_says_so(tokenizer):
    with pytest.raises(SlimeError, match=r"fills the context: \d+ of 1424 tokens"):
        work(tokenizer, "x", sample=Sample(index=0, prompt=[{"role": "user", "content": "x" * 2000}]))
    with pytest.raises(SlimeError, match="needs messages"):
        work(tokenizer, "x", sample=Sample(index=0, prompt="text"))


def test_the_recipe_names_it_and_the_generator_scores_its_segments(tokenizer):
    recipe = validate_recipe({"rollout": {"custom_generate": "tool_loop"}, "tools": {"use": ["calculator"]}})
    assert wants_messages(recipe)
    loop = load_generate("tool_loop", recipe)
    assert load_generate("tool_loop", recipe) is loop
    close_generate()
    assert load_generate("tool_loop", recipe) is not loop
    close_generate()
    with pytest.raises(SlimeError, match="no generate function 'tool_lop'.*did you mean.*tool_loop"):
        load_generate("tool_lop", recipe)

    async def reward(args, sample, **kwargs):
        return float("42" in sample.response)

    engine = Engine(tokenizer, f"{call('6 * 7')}<|im_end|>", "It is 42<|im_end|>")
    generator = Generator(
        engine=engine,
        reward=reward,
        args=HookArgs(recipe, engine=engine, tokenizer=tokenizer),
        timeout_s=10,
        custom=ToolLoop(ToolsSection(use=["calculator"])),
    )
    group = [Sample(group_index=0, index=0, prompt=[{"role": "user", "content": "What is 6 * 7"}])]
    (done,) = asyncio.run(generator.group(group, [{"max_new_tokens": 300, "stop_token_ids": [2]}]))
    assert (done.reward, done.status) == (1.0, SampleStatus.COMPLETED)

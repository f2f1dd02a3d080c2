"""A real SGLang server behind `slime serve`: conversations token by token, streamed, and new weights under them."""

import asyncio
import itertools

import pytest

from slimecli.agents.chat import Ask, Chat
from slimecli.agents.conversation import Sessions
from slimecli.recipe import load_recipe
from slimecli.rundir import RunDir
from slimecli.serving.fleet import ProcessFleet
from slimecli.serving.follow import Follower
from tests.engines.sglang import made
from tests.engines.sglang.conftest import sglang_python  # noqa: F401 - a fixture
from tests.models import tiny_model
from tests.serving.test_follow import commit


@pytest.mark.sglang
def test_sglang_is_served_streamed_and_follows(tmp_path, sglang_python):  # noqa: F811 - the fixture
    run = RunDir(tmp_path / "run")
    run.live_dir.mkdir(parents=True)
    recipe = load_recipe(overrides=made.overrides(sglang_python, *made.PATIENT))
    params = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True}

    async def work(fleet):
        chat = Chat(fleet.text, Sessions(fleet.text))
        messages = [{"role": "user", "content": "hi"}]
        parts = [a async for a in chat.stream(chat.prepare(Ask(messages=messages, params=params, session="s")))]
        assert len(parts) > 2 and all(b.content.startswith(a.content) for a, b in itertools.pairwise(parts))
        messages += [parts[-1].message, {"role": "user", "content": "more"}]
        commit(run, 5, seed=5)
        assert await Follower(run, fleet, version=0, timeout_s=300).look()
        await chat.answer(chat.prepare(Ask(messages=messages, params=params, session="s")))
        return chat.sessions.end("s", reward=1.0)

    fleet = ProcessFleet(recipe, tiny_model(tmp_path / "model"), tmp_path / "logs")

    async def all_of_it():
        try:
            return await work(fleet)
        finally:
            await fleet.close()

    (sample,) = asyncio.run(all_of_it())
    assert sample.effective_response_length == 12 and sample.weight_versions[-1] == "5"
    assert len(sample.weight_versions) == 2 and sample.metadata["turns"] == 2
    sample.check()

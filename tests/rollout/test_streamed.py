"""rollout.stream: the same samples, and nothing lost of answers that do not end."""

import asyncio
import dataclasses

import pytest

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.errors import SlimeError
from slimecli.types import SampleStatus
from tests.models import tiny_model
from tests.rollout.fakes import ScriptedEngine
from tests.rollout.pieces import collector

STREAM = "rollout.stream=true"
PARTIAL = ("rollout.partial=true", "rollout.over_sampling_batch_size=5", "rollout.max_filtered_rounds=3")
LONG = ("rollout.max_response_tokens=40",)


class Halting:
    """An engine in front of another: each answer's first request stops after some tokens, as `how` says."""

    def __init__(self, inner, how, after=7):
        self.inner, self.how, self.after = inner, how, after
        self.asked = []

    async def generate_stream(self, payload, tell):
        begins_here = [not p.get("custom_params") for p in payload["sampling_params"]]
        self.asked.append([len(ids) for ids in payload["input_ids"]])
        async for item in self.inner.stream(payload):
            is_cut = begins_here[item["index"]] and len(item["output_ids"]) > self.after
            if is_cut and self.how == "hang":
                await asyncio.sleep(60)
            if is_cut:
                raise SlimeError("engine 0 died", "restart it")
            tell(item)

    async def abort(self, rid=None):
        await self.inner.abort(rid)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def collect(folder, *sets, wrap=lambda engine: engine, timeout_s=5.0):
    """Samples of a step on the embedded engine."""

    async def work():
        engine = EmbeddedEngine(folder, slots=16, max_context=80)
        asked = wrap(engine)
        one, _ = collector(asked, *LONG, *sets)
        answering = one._answering
        answering.generator = dataclasses.replace(answering.generator, timeout_s=timeout_s)
        try:
            found = await one.collect(1)
        finally:
            await engine.close()
        return [s.to_dict() for g in found.groups for s in g], asked

    return asyncio.run(work())


def close(found, expected):
    """Equal, but for where one was cut, and for rounding in log-probs: the rest is computed after another prefill."""
    for one, other in zip(found, expected, strict=True):
        for name in ("tokens", "status", "response_length", "weight_versions", "index"):
            assert one[name] == other[name], name
        assert one["rollout_log_probs"] == pytest.approx(other["rollout_log_probs"], abs=1e-4)


def test_streaming_changes_no_sample(folder):
    off, _ = collect(folder)
    on, _ = collect(folder, STREAM)
    assert on == off and len({tuple(s["tokens"]) for s in on}) == len(on) == 8


@pytest.mark.parametrize("how", ["die", "hang"])
def test_an_unfinished_answer_goes_on_where_it_was(folder, how):
    off, _ = collect(folder)
    on, engine = collect(folder, STREAM, *PARTIAL, wrap=lambda e: Halting(e, how), timeout_s=1.5)
    by_group = {s["group_index"]: s for s in on}
    assert len(by_group) == 4 and len(on) == 8
    assert any(n >= 8 for lengths in engine.asked for n in lengths), "nothing was continued"
    whole = {s["index"]: s for s in off}
    same = [s for s in on if s["index"] in whole]
    assert same, "none of these groups is in the other batch"
    close(same, [whole[s["index"]] for s in same])


def test_without_partial_a_failed_answer_keeps_what_was_said(folder):
    off, _ = collect(folder)
    on, _ = collect(folder, STREAM, "rollout.max_failed_fraction=1", wrap=lambda e: Halting(Sparing(e), "die"))
    failed = [s for s in on if s["status"] == SampleStatus.FAILED.value]
    assert len(on) == 8 and len(failed) == 4 and all("engine 0 died" in s["metadata"]["failure"] for s in failed)
    whole = {s["index"]: s for s in off}
    for sample in failed:
        said = sample["response_length"]
        assert said == 7 and len(sample["rollout_log_probs"]) == said and sample["version_spans"] == [["0", 0, said]]
        assert sample["tokens"] == whole[sample["index"]]["tokens"][: 1 + said]


class Sparing:
    """Lets the first answer of every group have five tokens."""

    def __init__(self, inner):
        self.inner = inner

    async def stream(self, payload):
        first, *others = payload["sampling_params"]
        async for item in self.inner.stream({**payload, "sampling_params": [{**first, "max_new_tokens": 5}, *others]}):
            yield item

    async def abort(self, rid=None):
        await self.inner.abort(rid)


def test_an_answer_that_never_gets_further_fails_instead_of_being_asked_for_ever():
    class Dead:
        async def generate_stream(self, payload, tell):
            raise SlimeError("engine 0 died", "restart it")

        async def abort(self, rid=None):
            pass

    one, _ = collector(Dead(), STREAM, *PARTIAL)
    with pytest.raises(SlimeError, match="answers failed.*engine 0 died"):
        asyncio.run(one.collect(1))


def test_an_engine_that_cannot_stream_says_so():
    one, _ = collector(ScriptedEngine(lambda ids, params: [5, 2]), STREAM)
    with pytest.raises(SlimeError, match="ScriptedEngine cannot stream"):
        asyncio.run(one.collect(1))

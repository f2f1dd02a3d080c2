"""Stop strings that callers choose, thousands of them: answers end at their own, and memory does not grow."""

import asyncio

import pytest

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.request import BadRequest


def payload(seed, tokens=24, **params):
    params = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": seed, **params}
    return {"input_ids": [5, 9, seed], "sampling_params": params}


def test_every_answer_ends_at_its_own_string_and_masks_are_forgotten(models, monkeypatch):
    monkeypatch.setattr("slimecli.engines.embedded.scheduler.MASKS", 6)
    monkeypatch.setattr("slimecli.engines.embedded.text.MASKS", 6)
    engine = EmbeddedEngine(models("qwen3"), slots=3, max_context=64)

    async def scene():
        free = await asyncio.gather(*(engine.generate(payload(i)) for i in range(40)))
        letters = [next(c for c in reply["text"][8:] if c != "\ufffd") for reply in free]
        asked = [payload(i, stop=[letters[i], f"never said {i}"]) for i in range(40)]
        return free, letters, await asyncio.gather(*(engine.generate(p) for p in asked))

    free, letters, ended = asyncio.run(scene())
    for whole, letter, reply in zip(free, letters, ended, strict=True):
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": letter}
        assert reply["text"] == whole["text"][: whole["text"].index(letter)]
    assert len(engine._scheduler._masks) <= 6 + 1 + 3 and len(engine.codec._masks) <= 6
    asyncio.run(engine.close())


@pytest.mark.parametrize("stops", [{"stop": ["x"] * 2000}, {"stop_token_ids": [1] * 2000}])
def test_more_stops_than_anybody_needs_are_refused(models, stops):
    engine = EmbeddedEngine(models("qwen3"), slots=1, max_context=64)
    with pytest.raises(BadRequest, match="at most 1024"):
        asyncio.run(engine.generate(payload(1, **stops)))
    asyncio.run(engine.close())


def test_a_tokenizer_that_fails_on_stop_strings_is_an_error_and_no_endless_wait(models, monkeypatch):
    engine = EmbeddedEngine(models("qwen3"), slots=1, max_context=64)

    def fail(stops):
        raise IndexError("piece id is out of range")

    monkeypatch.setattr(engine.codec, "stop_mask", fail)
    with pytest.raises(IndexError, match="piece id is out of range"):
        asyncio.run(asyncio.wait_for(engine.generate(payload(1, stop=["x"])), 5))
    monkeypatch.undo()
    assert asyncio.run(engine.generate(payload(1, stop=["x"])))["output_ids"]
    asyncio.run(engine.close())

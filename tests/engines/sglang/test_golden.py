"""SGLang's wire format, as recorded from 0.5.21: what the embedded engine answers, and what slime's client reads.

Recorded anew by `python -m tests.engines.sglang.exchanges`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slimecli.engines.http import EngineRefusedError, HttpEngine
from slimecli.rollout.generate import append_reply
from slimecli.types import Sample, SampleStatus
from tests.engines.sglang.exchanges import EXCHANGES, play, recorded

LACKS = {
    "meta_info.cached_tokens_details", "meta_info.output_token_logprobs_length", "meta_info.reasoning_tokens",
    "meta_info.response_sent_to_client_ts", "meta_info.dp_rank",
    "choices[].message.reasoning_content", "usage.prompt_tokens_details", "usage.reasoning_tokens", "metadata",
    "data[].parent", "detail", "num_paused_requests",
}  # fmt: skip
"""of SGLang's replies, what the embedded engine leaves out: nothing in slime reads it"""
EMPTY = ("abort_all", "abort_one", "flush", "release", "resume")
"""SGLang answers with an empty body, or with text for people; the embedded engine with {"success": true}"""


def shape(value: Any, at: str = "") -> dict[str, str]:
    """Path -> type of every leaf, the first item standing for a list; numbers are numbers, null goes with anything."""
    if isinstance(value, dict):
        return {k: v for name, item in value.items() for k, v in shape(item, f"{at}.{name}".lstrip(".")).items()}
    if isinstance(value, list):
        return shape(value[0], f"{at}[]") if value else {}
    return {at: "number" if type(value) in (int, float) else type(value).__name__}


def lacking(theirs: Any, ours: Any) -> set[str]:
    """Leaves of a recorded reply that another one has not, or has with another type."""
    mine = shape(ours)
    said = shape(theirs)
    gone = {
        k for k, kind in said.items() if (mine.get(k) not in (kind, "NoneType") and kind != "NoneType") or k not in mine
    }
    return {
        k
        for k in gone
        if not any(k.lstrip("[].") == known or k.lstrip("[].").startswith(known + ".") for known in LACKS)
    }


@pytest.fixture(scope="module")
def golden():
    found = recorded()
    assert found.keys() == EXCHANGES.keys()
    return found


def test_the_embedded_engine_answers_in_the_recorded_form(golden, embedded_url, models):
    answers = play(embedded_url, models("qwen3"))
    assert {n: a["status"] for n, a in answers.items()} == {n: g["status"] for n, g in golden.items()}
    wrong = {n: gone for n in golden if n not in EMPTY and (gone := lacking(golden[n]["body"], answers[n]["body"]))}
    assert wrong == {}


def test_the_embedded_engine_says_the_same(golden, embedded_url, models):
    """Not only the form: same weights, greedy, so the same tokens and log-probs."""
    answers = play(embedded_url, models("qwen3"))
    for name in ("generate", "generate_input_logprobs", "generate_stop_token", "generate_stop_string"):
        ours, theirs = answers[name]["body"], golden[name]["body"]
        assert ours["output_ids"] == theirs["output_ids"] and ours["text"] == theirs["text"], name
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"], name
        marks = [[x for x, _, _ in r["meta_info"].get("output_token_logprobs", [])] for r in (ours, theirs)]
        assert marks[0] == pytest.approx(marks[1], abs=1e-5), name


@pytest.mark.sglang
def test_real_answers_have_the_recorded_form(golden, real_server, models):
    answers = play(real_server.url, models("qwen3"))
    assert {n: a["status"] for n, a in answers.items()} == {n: g["status"] for n, g in golden.items()}
    for name in golden:
        assert shape(answers[name]["body"]).keys() == shape(golden[name]["body"]).keys(), name


class Replayed(HttpEngine):
    """A client whose server answers with one recording."""

    def __init__(self, recording):
        super().__init__("http://recorded", timeout_s=5)
        self._recording = recording

    async def _exchange(self, method, path, data, timeout_s, headers=None):
        body = self._recording["body"]
        raw = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        return raw, self._recording["status"]


def ask(golden, name, do):
    return asyncio.run(do(Replayed(golden[name])))


def test_the_client_reads_recorded_rollouts(golden):
    replies = ask(golden, "generate_rollout", lambda e: e.generate({}))
    assert len(replies) == 2
    for reply in replies:
        sample = Sample(tokens=[5, 6, 7])
        append_reply(sample, reply)
        sample.reward = 0.0
        sample.check()
        assert sample.tokens == [5, 6, 7, *reply["output_ids"]] and sample.response_length == len(reply["output_ids"])
        assert sample.weight_versions == ["0"] and sample.response == reply["text"]
        assert sample.status is SampleStatus.TRUNCATED or reply["meta_info"]["finish_reason"]["type"] == "stop"
    stopped = Sample(tokens=[5])
    append_reply(stopped, ask(golden, "generate_stop_string", lambda e: e.generate({})))
    assert stopped.status is SampleStatus.COMPLETED


@pytest.mark.parametrize(
    ("name", "do"),
    [
        ("health", lambda e: e.health()),
        ("abort_all", lambda e: e.abort()),
        ("abort_one", lambda e: e.abort("nobody")),
        ("pause", lambda e: e.pause("retract")),
        ("continue", lambda e: e.resume()),
        ("release", lambda e: e.sleep(("kv_cache",))),
        ("resume", lambda e: e.wake(("kv_cache",))),
    ],
)
def test_the_client_takes_recorded_control_answers(golden, name, do):
    assert ask(golden, name, do) is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("generate_bad_value", "temperature must be a non-negative finite number"),
        ("generate_too_long", "longer than the model's context length"),
        ("end_without_begin", "no weight-update session is open"),
        ("update_no_such_folder", "Failed to get weights iterator"),
        ("update_outside_begin", "must run between begin_weight_update"),
        ("no_such_path", "Not Found"),
    ],
)
def test_the_client_passes_on_why_sglang_refused(golden, name, told):
    with pytest.raises(EngineRefusedError) as error:
        ask(golden, name, lambda e: e.call("POST", "/x", {}, "being tested"))
    assert told in error.value.what and error.value.status == golden[name]["status"]


def test_the_client_tells_servers_apart(golden, embedded_url):
    assert ask(golden, "server_info", lambda e: e.weights.is_embedded()) is False
    client = HttpEngine(embedded_url, timeout_s=10)
    assert asyncio.run(client.weights.is_embedded()) is True
    asyncio.run(client.close())

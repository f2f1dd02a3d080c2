import asyncio
import contextlib
import json
import time

import pytest
from aiohttp import web

from slimecli.data_tools.rewards import RewardTimeout, http, load_reward
from slimecli.data_tools.rewards.judge import read_score
from slimecli.errors import SlimeError, UsageError
from slimecli.recipe import load_recipe
from slimecli.recipe_reward import RewardSection
from slimecli.rollout.args import HookArgs
from slimecli.types import Sample
from tests.models import tiny_model


@contextlib.asynccontextmanager
async def serving(answer):
    """A server that hands every request's JSON to `answer` and sends back what that returns (or the response)."""
    seen = []

    async def handle(request):
        body = await request.json()
        seen.append((request.path, body, dict(request.headers)))
        result = answer(len(seen), body)
        result = await result if asyncio.iscoroutine(result) else result
        return result if isinstance(result, web.StreamResponse) else web.json_response(result)

    app = web.Application()
    app.router.add_post("/{tail:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", seen
    finally:
        await runner.cleanup()


def ask(answer, samples=None, section=None):
    """(outcomes, requests) of scoring samples against such a server; {url} in the section becomes its address."""
    samples = samples or [Sample(index=0, prompt="p{response}", response="r{label}", label="l")]

    async def work():
        async with serving(answer) as (url, seen):
            text = json.dumps(section or {"type": "remote_rm", "rm_url": "{url}/score"}).replace("{url}", url)
            reward = load_reward(RewardSection.model_validate_json(text))
            return await reward.each(None, samples), seen

    return asyncio.run(work())


def chat(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


JUDGE = {"type": "judge", "judge": {"url": "{url}", "model": "m"}}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.01)


def test_remote_gets_slimes_payload():
    outcomes, seen = ask(lambda n, body: 0.25)
    assert outcomes == [0.25]
    assert seen[0][:2] == ("/score", {"prompt": "p{response}", "response": "r{label}", "label": "l"})


def test_remote_may_answer_named_scores():
    assert ask(lambda n, body: {"score": 1, "length": 0.5})[0] == [{"score": 1.0, "length": 0.5}]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(status):
    outcomes, seen = ask(lambda n, body: web.Response(status=status) if n < 3 else 1.0)
    assert outcomes == [1.0] and len(seen) == 3


@pytest.mark.parametrize(
    ("answer", "tries", "message"),
    [
        (lambda n, body: web.Response(status=503, text="later"), 3, "after 3 tries: HTTP 503: later"),
        (lambda n, body: web.Response(status=404, text="not here"), 1, "after 1 tries: HTTP 404: not here"),
        (lambda n, body: web.Response(text="<html>"), 1, "'<html>', which is not JSON"),
        (lambda n, body: {"score": "high"}, 1, "returned {'score': 'high'}"),
        (lambda n, body: None, 1, "returned None"),
        (lambda n, body: web.Response(text="NaN"), 1, "returned nan"),
    ],
)
def test_a_server_that_fails_gives_a_failure_not_a_zero(answer, tries, message):
    section = {"type": "remote_rm", "rm_url": "{url}", "retries": 2}
    (outcome,), seen = ask(answer, section=section)
    assert isinstance(outcome, SlimeError) and message in outcome.what and "sample 0" in outcome.what
    assert len(seen) == tries


def test_a_server_that_hangs_meets_the_deadline():
    section = {"type": "remote_rm", "rm_url": "{url}", "timeout_s": 0.2}
    start = time.monotonic()
    (outcome,), _ = ask(lambda n, body: asyncio.sleep(20), section=section)
    assert isinstance(outcome, RewardTimeout) and time.monotonic() - start < 3


def test_no_server_at_all():
    reward = load_reward(RewardSection(type="remote_rm", rm_url="http://127.0.0.1:9/", retries=1))
    with pytest.raises(SlimeError, match="after 2 tries: ClientConnector"):
        asyncio.run(reward(None, Sample(index=0, response="r")))


@pytest.mark.parametrize(
    "section",
    [
        {"type": "remote_rm"},
        {"type": "remote_rm", "rm_url": "localhost:80"},
        {"type": "judge"},
        {"type": "judge", "judge": {"url": "http://x", "low": 5, "high": 5}},
        {"type": "tournament"},
        {"type": "tournament", "group": True},
        {"type": "mix"},
        {"type": "mix", "mix": {"mix": 1.0}},
        {"type": "mix", "mix": {"maths": 1.0}},
    ],
)
def test_settings_are_checked_before_anything_is_scored(section):
    with pytest.raises(UsageError):
        load_reward(RewardSection.model_validate(section))


def test_judge_asks_and_scales():
    outcomes, seen = ask(lambda n, body: chat("<think>[[1]]</think>Fine. [[7.5]]"), section=JUDGE)
    assert outcomes == [0.75]
    path, body, headers = seen[0]
    assert path == "/v1/chat/completions" and body["model"] == "m" and body["temperature"] == 0.0
    content = body["messages"][0]["content"]
    assert "<task>\np{response}\n</task>" in content and "<answer>\nr{label}\n</answer>" in content
    assert "from 0 (useless) to 10 (perfect)" in content and "Authorization" not in headers
    scale = {**JUDGE, "judge": {**JUDGE["judge"], "low": 1, "high": 5}}
    outcomes, seen = ask(lambda n, body: chat("[[2]]"), section=scale)
    assert outcomes == [0.25] and "from 1 (useless) to 5 (perfect)" in seen[0][1]["messages"][0]["content"]


def test_judge_template_key_and_address(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "abc")
    judge = {"url": "{url}/v1/", "prompt": "Q {prompt} A {response} {unknown}", "high": 1, "api_key_env": "JUDGE_KEY"}
    samples = [Sample(index=0, prompt=[{"role": "user", "content": "hi"}], response="yo")]
    outcomes, seen = ask(lambda n, body: chat("score: 1"), samples, {"type": "judge", "judge": judge})
    assert outcomes == [1.0] and seen[0][0] == "/v1/chat/completions"
    assert seen[0][1]["messages"][0]["content"] == "Q user: hi A yo {unknown}"
    assert seen[0][2]["Authorization"] == "Bearer abc"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (chat("I would rather not say"), "holds no score"),
        (chat("[[11]]"), "gave 11, outside 0..10"),
        (chat(None), "holds no score"),
        ({"error": "no model"}, "no chat completion"),
    ],
)
def test_a_judge_without_a_verdict_is_a_failure(reply, message):
    (outcome,), _ = ask(lambda n, body: reply, section=JUDGE)
    assert isinstance(outcome, SlimeError) and message in outcome.what


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("[[3]] then [[4.5]]", 4.5),
        ("[[ -2 ]]", -2.0),
        ("[[7/10]]", 7.0),
        ("Score: 8", 8.0),
        ("**Rating**: 6 of 10", 6.0),
        ("score = 3, score = 4", 4.0),
        (" 5 ", 5.0),
    ],
)
def test_read_score(text, score):
    assert read_score(text) == score


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory):
    from slimecli.engines.embedded.engine import EmbeddedEngine
    from slimecli.engines.embedded.server import start_server_thread

    folder = tiny_model(tmp_path_factory.mktemp("models") / "judge", "qwen3")
    url, stop = start_server_thread(EmbeddedEngine(folder, slots=2, max_context=256))
    yield url
    stop()


def test_judge_against_our_own_engine(engine_url):
    judge = {"url": engine_url, "max_tokens": 3, "prompt": "{response}", "temperature": 1.0}
    section = RewardSection.model_validate({"type": "judge", "judge": judge, "timeout_s": 20.0, "retries": 0})
    (outcome,) = asyncio.run(load_reward(section).each(None, [Sample(index=0, response="1 + 1", label="2")]))
    # the model is random: what counts is that the engine took the request and its reply was read
    assert isinstance(outcome, float) or "holds no score" in outcome.what or "outside 0..10" in outcome.what


def compare_lengths(n, body):
    content = body["messages"][0]["content"]
    first = content.partition("<answer_A>\n")[2].partition("\n</answer_A>")[0]
    second = content.partition("<answer_B>\n")[2].partition("\n</answer_B>")[0]
    return chat("[[C]]" if len(first) == len(second) else "[[A]]" if len(first) > len(second) else "[[B]]")


def tournament(answer, lengths, **settings):
    samples = [Sample(index=i, group_index=4, prompt="p", response="x" * n) for i, n in enumerate(lengths)]

    async def work():
        async with serving(answer) as (url, seen):
            section = {"type": "tournament", "group": True, "judge": {"url": url}, "tournament": settings}
            return await load_reward(RewardSection.model_validate(section))(None, samples), len(seen)

    return asyncio.run(work())


def test_round_robin_ranks_by_meetings_won():
    scores, asked = tournament(compare_lengths, [1, 3, 2, 3])
    assert scores == [0.0, 2.5 / 3, 1 / 3, 2.5 / 3] and asked == 12
    assert tournament(compare_lengths, [1, 3, 2, 3], both_orders=False) == (scores, 6)


def test_both_orders_cancel_a_judge_that_prefers_a_place():
    assert tournament(lambda n, body: chat("[[A]]"), [1, 2, 3])[0] == [0.5, 0.5, 0.5]
    assert tournament(lambda n, body: chat("[[A]]"), [1, 2, 3], both_orders=False)[0] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_single_elimination_lets_the_best_win_and_repeats(n):
    lengths = [(7 * i) % n + 1 for i in range(n)]
    first, asked = tournament(compare_lengths, lengths, schedule="single_elimination", both_orders=False)
    again, _ = tournament(compare_lengths, lengths, schedule="single_elimination", both_orders=False)
    assert first == again and asked == n - 1
    if n == 1:
        assert first == [0.5]
    else:
        assert first[lengths.index(max(lengths))] == 1.0 and first.count(1.0) == 1 and min(first) == 0.0


def test_a_meeting_without_verdict_fails_the_group():
    with pytest.raises(SlimeError, match=r"no \[\[A\]\]"):
        tournament(lambda n, body: chat("both are fine"), [1, 2])


OWN = """
def longer(args, first, second):
    return float(len(first.response) > len(second.response))

def wrong(args, first, second):
    return "first"

def noted(args, first, second):
    with open(__file__.replace("own.py", "met.txt"), "a") as out:
        print(first.index, second.index, file=out)
    return longer(args, first, second)

def short(args, sample, **kw):
    return 1.0 / (1 + len(sample.response))
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path}/own.py:{name}"


def test_own_comparisons(own):
    samples = [Sample(index=i, response="x" * n) for i, n in enumerate((2, 1))]
    section = {"type": "tournament", "group": True, "tournament": {"compare": own("longer"), "both_orders": False}}
    assert asyncio.run(load_reward(RewardSection.model_validate(section))(None, samples)) == [1.0, 0.0]
    section["tournament"]["compare"] = own("wrong")
    with pytest.raises(SlimeError, match="returned 'first'"):
        asyncio.run(load_reward(RewardSection.model_validate(section))(None, samples))


def bracket(own, tmp_path, seed, group, n):
    """(who met whom in each meeting, scores) of an elimination in which the longer answer wins."""
    (tmp_path / "met.txt").write_text("")
    section = {"schedule": "single_elimination", "compare": own("noted"), "both_orders": False}
    reward = load_reward(RewardSection.model_validate({"type": "tournament", "group": True, "tournament": section}))
    samples = [Sample(index=i, group_index=group, response="x" * (i + 1)) for i in range(n)]
    scores = asyncio.run(reward(HookArgs(load_recipe("", (f"seed={seed}",))), samples))
    return [tuple(map(int, line.split())) for line in (tmp_path / "met.txt").read_text().splitlines()], scores


def test_a_bracket_is_drawn_by_the_runs_seed_and_the_group(own, tmp_path):
    first = bracket(own, tmp_path, 0, 0, 8)
    assert bracket(own, tmp_path, 0, 0, 8) == first
    by_group = {frozenset(map(frozenset, bracket(own, tmp_path, 0, group, 8)[0][:4])) for group in range(4)}
    by_seed = {frozenset(map(frozenset, bracket(own, tmp_path, seed, 0, 8)[0][:4])) for seed in range(4)}
    assert len(by_group) == len(by_seed) == 4, "of 105 first rounds"


def test_nobody_sits_out_twice_in_a_row(own, tmp_path):
    for seed in range(6):
        met, _ = bracket(own, tmp_path, seed, 0, 5)  # two meetings, then one and one who sits out, then the final
        idle = set(range(5)) - {i for pair in met[:2] for i in pair}
        assert len(idle) == 1 and idle < set(met[2]), "who had no meeting in the first round has one in the second"


def test_a_row_cannot_ask_for_a_tournament_of_its_own():
    reward = load_reward(RewardSection(type="exact"))
    (outcome,) = asyncio.run(reward.each(None, [Sample(index=0, response="1", metadata={"rm_type": "tournament"})]))
    assert isinstance(outcome, UsageError) and "group" in outcome.what


def test_mix_weighs_and_keeps_the_parts(own):
    section = RewardSection(type="mix", mix={"math": 0.8, "format": 0.2, own("short"): -1.0})
    sample = Sample(index=0, response="\\boxed{1/2}", label="0.5")
    row = asyncio.run(load_reward(section)(None, sample))
    assert row == {"score": pytest.approx(1.0 - 1 / 12), "math": 1.0, "format": 1.0, own("short"): 1 / 12}
    sample.reward = row
    assert sample.get_reward_value() == row["score"] and sample.get_reward_value("math") == 1.0


def test_mix_takes_the_score_of_named_scores_and_keeps_its_parts_fixed():
    section = RewardSection(type="mix", mix={"dapo": 1.0, "format": 1.0})
    sample = Sample(index=0, response="\\boxed{2}\nAnswer: 2", label="2")
    assert asyncio.run(load_reward(section)(None, sample)) == {"score": 2.0, "dapo": 1.0, "format": 1.0}
    sample.metadata = {"rm_type": "exact"}
    assert asyncio.run(load_reward(section)(None, sample)) == 0.0, "the row's own type replaces the whole mix"


def test_a_part_that_fails_fails_the_mix():
    section = RewardSection(type="mix", mix={"math": 0.8, "format": 0.2})
    with pytest.raises(SlimeError, match="needs a label"):
        asyncio.run(load_reward(section)(None, Sample(index=0, response="\\boxed{1}")))


def test_a_mix_may_hold_a_tournament(own):
    section = RewardSection.model_validate(
        {
            "type": "mix",
            "group": True,
            "mix": {"tournament": 1.0, "exact": 2.0},
            "tournament": {"compare": own("longer")},
        }
    )
    samples = [Sample(index=0, response="ab", label="c"), Sample(index=1, response="c", label="c")]
    reward = load_reward(section)
    assert reward.group
    assert [row["score"] for row in asyncio.run(reward(None, samples))] == [1.0, 2.0]

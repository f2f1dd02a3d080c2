"""Which engine gets a request."""

from collections import Counter
from dataclasses import dataclass

import pytest

from slimecli.engines.router.policies import Ask, CacheAware, ConsistentHashing, LeastLoad, RoundRobin, rendezvous


@dataclass
class Place:
    url: str
    load: int = 0


@pytest.fixture
def places():
    return [Place(f"http://127.0.0.1:{i}") for i in range(4)]


def test_round_robin_gives_everybody_the_same(places):
    policy = RoundRobin()
    assert set(Counter(policy.pick(Ask(), places).url for _ in range(40)).values()) == {10}


def test_least_load_takes_the_idlest_and_among_equals_who_had_least(places):
    policy = LeastLoad()
    assert set(Counter(policy.pick(Ask(), places).url for _ in range(40)).values()) == {10}
    for place in places[:3]:
        place.load = 5
    assert {policy.pick(Ask(), places).url for _ in range(5)} == {places[3].url}


def test_a_key_stays_where_it_is_when_another_engine_leaves(places):
    policy = ConsistentHashing()
    before = {key: policy.pick(Ask(f"s{key}"), places).url for key in range(200)}
    assert min(Counter(before.values()).values()) > 20, "keys are spread"
    gone = places.pop(1)
    after = {key: policy.pick(Ask(f"s{key}"), places).url for key in range(200)}
    moved = [key for key in before if before[key] != after[key]]
    assert moved and all(before[key] == gone.url for key in moved)
    assert rendezvous("a", ["x"]) == rendezvous("no text: \udcff", ["x"]) == 0


@pytest.mark.parametrize("prompt", ["x" * 900, list(range(300))], ids=["text", "ids"])
def test_cache_aware_follows_the_beginning_of_a_prompt(places, prompt):
    policy = CacheAware()
    tail = "tail" if isinstance(prompt, str) else [1, 2, 3]
    first = policy.pick(Ask("", prompt), places)
    others = [policy.pick(Ask("", f"{i}" * 900), places) for i in range(8)]
    assert {p.url for p in others} == {p.url for p in places}, "unrelated prompts are spread"
    assert all(policy.pick(Ask("", prompt + tail), places) is first for _ in range(5))
    rest = [p for p in places if p is not first]
    assert policy.pick(Ask("", prompt), rest) in rest, "a dead engine's prompts go to others"


def test_cache_aware_leaves_an_overloaded_engine(places):
    policy = CacheAware(abs_threshold=4, rel_threshold=1.5)
    first = policy.pick(Ask("", "x" * 900), places)
    first.load = 4
    assert policy.pick(Ask("", "x" * 900), places) is first
    first.load = 5
    second = policy.pick(Ask("", "x" * 900), places)
    assert second is not first
    first.load = 0
    assert policy.pick(Ask("", "x" * 900), places) is second, "its keys and values are now there"


def test_cache_aware_wants_enough_of_the_prompt_to_be_known(places):
    policy = CacheAware(threshold=0.5)
    first = policy.pick(Ask("", "x" * 256), places)
    for place in places:
        place.load = 3 if place is first else 0
    assert policy.pick(Ask("", "x" * 256 + "z" * 10), places) is first
    assert policy.pick(Ask("", "x" * 256 + "y" * 256 * 3), places) is not first


def test_cache_aware_forgets_what_is_longest_out_of_use(places):
    policy = CacheAware(entries=10)
    for i in range(1000):
        policy.pick(Ask("", f"{i:04}" * 500), places)
    assert len(policy._seen) == 10


def test_a_key_goes_before_the_beginning(places):
    policy = CacheAware()
    chosen = {policy.pick(Ask("session", f"{i}" * 900), places).url for i in range(10)}
    assert len(chosen) == 1

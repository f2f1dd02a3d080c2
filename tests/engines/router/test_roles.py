"""Engines that compute prompts and engines that continue answers, behind a real smg."""

import time

import pytest

from slimecli.engines.router import start_router
from slimecli.engines.router.programs import find
from slimecli.recipe import load_recipe


@pytest.fixture
def split(engines, tmp_path):
    """A router in front of a prefill and a decode engine. The engines are equal ones: smg reads their roles from us."""
    if find("smg") is None:
        pytest.skip("smg is not installed: pip install -e '.[dev]'")
    recipe = load_recipe("", ("engine.router=smg", "engine.start_timeout_s=30"))
    first, second, third = engines(3)
    roles = [("prefill", 8998), ("decode", 0)]
    urls = [first.url, second.url]
    router = start_router(recipe, urls, host="127.0.0.1", port=0, log=tmp_path / "log", roles=roles)
    yield router, first, second, third
    router.close()


def roles_of(router):
    return {w["url"]: w["worker_type"] for w in router.workers()}


def test_each_engine_has_its_role(split):
    router, first, second, _ = split
    assert roles_of(router) == {first.url: "prefill", second.url: "decode"}


def test_an_engine_that_replaces_another_takes_its_role(split):
    router, first, second, third = split
    router.remove(second.url)
    router.roles[third.url] = ("decode", 0)
    router.add(third.url)
    wanted, end = {first.url: "prefill", third.url: "decode"}, time.monotonic() + 15
    while roles_of(router) != wanted and time.monotonic() < end:  # smg answers before it has let go
        time.sleep(0.05)
    assert roles_of(router) == wanted

"""A real SGLang server where there is one, and a made-up SGLang for what needs none."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from slimecli import env
from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.server import start_server_thread
from slimecli.engines.http import HttpEngine
from slimecli.engines.sglang.launch import start_server
from slimecli.recipe import load_recipe
from tests.engines.sglang import made

ROOT = Path(__file__).resolve().parents[3]


def real_python():
    """The interpreter that has SGLang, or None."""
    python = Path(env.sglang_python() or ROOT / ".venv-sglang" / "bin" / "python")
    return python if python.is_file() else None


@pytest.fixture(scope="session")
def sglang_python():
    """The interpreter that has SGLang; without one the test is skipped, with the command that makes one."""
    python = real_python()
    if python is None:
        pytest.skip("no SGLang here: `python3 bootstrap.py test --sglang` makes an environment with it (3 minutes)")
    return python


@pytest.fixture(scope="package")
def real_recipe(sglang_python):
    """The recipe of the folder's server."""
    return load_recipe("", made.overrides(sglang_python, *made.PATIENT))


@pytest.fixture(scope="package")
def real_server(real_recipe, models, tmp_path_factory):
    """One SGLang server for all tests of this folder; it is gone when others run."""
    server = start_server(real_recipe, models("qwen3"), log=tmp_path_factory.mktemp("sglang") / "server.log")
    yield server
    server.close()


@pytest.fixture(scope="package")
def embedded_url(models):
    """The embedded engine behind HTTP, on the same model."""
    engine = EmbeddedEngine(models("qwen3"), slots=8, max_context=512)
    url, stop = start_server_thread(engine)
    yield url
    stop()


@pytest.fixture(params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def served(request):
    """A client of either server, holding the weights of seed 0."""
    url = request.getfixturevalue("embedded_url" if request.param == "embedded" else "real_server")
    client = HttpEngine(getattr(url, "url", url), timeout_s=180)
    client.kind = request.param
    yield client
    asyncio.run(client.close())


async def until_busy(client, requests, *tasks):
    """Wait until so many requests are being answered; none of the tasks that asked for them may have ended before."""
    end = time.monotonic() + 120
    while (await client.call("GET", "/v1/loads", None, "telling its load"))["loads"][0]["num_running_reqs"] < requests:
        assert time.monotonic() < end and not any(task.done() for task in tasks)


@pytest.fixture
def made_up(tmp_path):
    """An interpreter that finds a made-up package `sglang`; see made.py."""
    return made.installation(tmp_path, sys.executable)

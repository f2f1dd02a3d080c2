"""Engines that others run must be there when a run begins; those that start, or may come later, are waited for."""

import contextlib
import http.server
import threading
import time

import pytest

from slimecli.engines.attached import check_engines
from slimecli.errors import SlimeError
from slimecli.ports import free_port
from slimecli.recipe import load_recipe
from tests.forked import slime
from tests.tiny_run import sets


@contextlib.contextmanager
def server(*answers, port=0):
    """Its health checks are answered with these statuses, the last one for ever; yields its URL."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.end_headers()

        def log_message(self, *args):
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def check(*urls, **more):
    check_engines(load_recipe("", (f"engine.urls={list(urls)}", *(f"engine.{k}={v}" for k, v in more.items()))))


def test_a_run_on_an_engine_that_is_not_there_ends_before_anything_is_made(tmp_path):
    dead = f"http://127.0.0.1:{free_port()}"
    begin = time.monotonic()
    ended = slime(
        "run", "--recipe", "quickstart", "--run", "r", *sets(f"engine.urls=['{dead}']"), folder=tmp_path, timeout_s=60
    )
    assert ended.code == 1 and time.monotonic() - begin < 30
    assert f"1 of 1 of engine.urls cannot be asked: no connection to the engine at {dead}" in ended.err
    assert "fix: start them or mend engine.urls; --set engine.urls_wait_s=SECONDS waits" in ended.err
    assert not (tmp_path / "runs" / "r" / "data").exists()


def test_data_model_and_sft_need_no_engine(tmp_path):
    urls = f"engine.urls=['http://127.0.0.1:{free_port()}']"
    words = ("run", "--recipe", "quickstart", "--run", "r", *sets("data.count=20", "data.holdout=2", urls))
    assert slime(*words, "--until", "data", folder=tmp_path).code == 0


def test_the_one_that_is_not_there_is_named():
    dead = f"http://127.0.0.1:{free_port()}"
    with server(200) as there, pytest.raises(SlimeError) as caught:
        check(there, dead)
    assert "1 of 2 of engine.urls" in caught.value.what and dead in caught.value.what and there not in caught.value.what


def test_an_engine_that_is_starting_is_waited_for():
    with server(503, 503, 200) as url:
        check(url)
    with server(503) as url, pytest.raises(SlimeError, match=f"the engine at {url} refused"):
        check(url, start_timeout_s=0.5)


def test_what_is_no_engine_is_not_waited_for():
    with server(404) as url, pytest.raises(SlimeError, match="refused while answering its health check: HTTP 404"):
        check(url, urls_wait_s=600)


def test_an_engine_may_come_later_where_the_recipe_says_so():
    port = free_port()
    with contextlib.ExitStack() as stack:
        timer = threading.Timer(0.7, lambda: stack.enter_context(server(200, port=port)))
        timer.start()
        begin = time.monotonic()
        check(f"http://127.0.0.1:{port}", urls_wait_s=30)
        assert 0.5 < time.monotonic() - begin < 20
        timer.join()

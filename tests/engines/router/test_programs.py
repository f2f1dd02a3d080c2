"""Which arguments a router takes is read from its own help."""

import importlib
import os
import signal
import threading
import time

import pytest

from slimecli.engines.router import launch, router_program, start_router
from slimecli.engines.router.programs import arguments, find, parse_help, words
from slimecli.errors import RecipeError, SlimeError, UsageError
from slimecli.recipe import load_recipe
from tests.engines.processes import payload

HELP = """\
usage: x [-h] [--policy {a,b}] [--dry]
         [--wrapped WRAPPED]

options:
  -h, --help            show this help message and exit
  --policy {a,b}        which (default: --dry)
  --a-very-long-option-name WITH_A_VALUE
                        told below
  --dry                 a switch
  -n N, --count N       short and long
  --yes, --no           two names
"""


def test_help_is_read():
    found = parse_help(HELP)
    assert sorted(found) == ["a-very-long-option-name", "count", "dry", "no", "policy", "yes"]
    assert found["policy"].choices == ("a", "b") and not found["policy"].is_flag
    assert [n for n in sorted(found) if found[n].is_flag] == ["dry", "no", "yes"]


def test_the_built_in_router_knows_its_own_arguments():
    assert {"policy", "retry-max-retries", "worker-urls", "max-tree-size"} <= set(arguments("builtin"))
    given = {"policy": "round_robin", "max_tree_size": 5}
    assert words("builtin", given) == ["--policy", "round_robin", "--max-tree-size", "5"]


def test_every_wrong_entry_is_named_with_what_was_meant():
    given = {"polcy": "x", "policy": "round_robbin", "port": 1, "max-tree-size": True}
    with pytest.raises(RecipeError) as caught:
        words("builtin", given)
    told = "\n".join(caught.value.problems)
    assert "did you mean 'policy'" in told and "did you mean 'round_robin'" in told
    assert "slime sets this itself" in told and "needs a value" in told and len(caught.value.problems) == 4


def test_smg_is_asked_for_its_arguments():
    if find("smg") is None:
        pytest.skip("smg is not installed: pip install -e '.[dev]'")
    assert len(arguments("smg")) > 100
    given = {"policy": "power_of_two", "enable-wasm": True, "disable-retries": False, "request-id-headers": ["a", "b"]}
    line = ["--policy", "power_of_two", "--enable-wasm", "--request-id-headers", "a", "b"]
    assert words("smg", given) == line
    with pytest.raises(RecipeError, match="cache-threshold"):
        words("smg", {"cache_treshold": 1})


@pytest.mark.parametrize("line", [["/bin/sh", "-c", "sleep 30"], ["/etc/hostname"]])
def test_a_program_that_does_not_tell_its_arguments(monkeypatch, line):
    monkeypatch.setattr("slimecli.engines.router.programs.HELP_S", 0.3)
    monkeypatch.setattr("slimecli.engines.router.programs.find", lambda name: line)
    arguments.cache_clear()
    with pytest.raises(SlimeError, match="smg does not tell its arguments"):
        arguments("smg")


def test_which_router_auto_means(monkeypatch):
    from slimecli.engines.router import programs

    recipe = load_recipe("", ())
    monkeypatch.setattr(programs, "find", lambda name: ["x"])
    assert router_program(recipe) == "smg"
    assert router_program(recipe, api_key="k") == "builtin", "smg asks nobody for a key"
    monkeypatch.setattr(programs, "find", lambda name: None)
    assert router_program(recipe) == "builtin"
    with pytest.raises(SlimeError, match="pip install sglang-router"):
        programs.command("sglang")


def test_a_script_of_another_package_is_not_taken(monkeypatch, tmp_path):
    """sglang-router brings a script that is called smg; and a folder smg/ is importable, but no program."""
    from slimecli.engines.router import programs

    script = tmp_path / "smg"
    script.write_text("#!/usr/bin/python3\nimport sys\nfrom sglang_router.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)
    (tmp_path / "folder" / "smg").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs.sys, "path", [str(tmp_path / "folder")])
    monkeypatch.delitem(programs.sys.modules, "smg", raising=False)
    importlib.invalidate_caches()
    assert find("smg") is None
    script.write_text(script.read_text().replace("sglang_router", "smg"))
    assert find("smg") == [str(script), "launch"]


def test_a_key_is_not_left_unasked_for(tmp_path):
    recipe = load_recipe("", ("engine.router='smg'",))
    with pytest.raises(UsageError, match="API key"):
        start_router(recipe, [], host="127.0.0.1", port=0, log=tmp_path / "log", api_key="k")
    recipe = load_recipe("", ("engine.router='none'",))
    with pytest.raises(UsageError, match="none"):
        start_router(recipe, [], host="127.0.0.1", port=0, log=tmp_path / "log")


def test_a_router_that_does_not_start_tells_why(tmp_path):
    recipe = load_recipe("", ("engine.router='builtin'", "router.max-tree-size='many'"))
    with pytest.raises(SlimeError, match=r"exit code 2.*invalid int value: 'many'"):
        start_router(recipe, [], host="127.0.0.1", port=0, log=tmp_path / "log")


def test_a_killed_router_comes_back_at_its_address_with_its_engines(engines, router, ask, capsys):
    pair = engines(2)
    front = router(pair[:1], restarts=1)
    front.add(pair[1].url)
    os.kill(front.pid, signal.SIGKILL)
    end = time.monotonic() + 15
    while front.restarts == 0 or "restarted in" not in (told := capsys.readouterr().err):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert front.url in told
    assert sorted(w["url"] for w in front.workers()) == sorted(e.url for e in pair)
    assert [s for s, _ in ask(front.url, [payload(1)])] == [200]


def test_a_router_that_may_not_be_restarted_is_named(engines, router):
    gone, told = threading.Event(), []
    front = router(engines(1), on_death=lambda error: (told.append(error), gone.set()))
    os.kill(front.pid, signal.SIGKILL)
    assert gone.wait(10)
    assert front.url in told[0].what and "exit code -9" in told[0].what and not front.alive()


def test_closing_is_no_death(engines, router):
    told = []
    front = router(engines(1), on_death=told.append, restarts=3)
    front.close()
    front.close()
    time.sleep(0.2)
    assert not front.alive() and not told and front.restarts == 0


def test_a_router_that_is_closed_while_it_is_started_again_stays_closed(engines, router, monkeypatch):
    told, asked, real = [], threading.Event(), launch.env.child_env
    front = router(engines(1), on_death=told.append, restarts=1)

    def environment(**variables):  # asked for just before the process is started
        front.close()
        asked.set()
        return real(**variables)

    monkeypatch.setattr(launch.env, "child_env", environment)
    os.kill(front.pid, signal.SIGKILL)
    assert asked.wait(10)
    time.sleep(0.5)
    assert not front.alive() and not told


@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_router_on_an_address_of_the_newer_kind(engines, ask, host, tmp_path):
    recipe = load_recipe("", ("engine.router='builtin'",))
    (only,) = engines(1)
    front = start_router(recipe, [only.url], host=host, port=0, log=tmp_path / "log")
    try:
        assert front.url.startswith("http://[::1]:")
        assert [s for s, _ in ask(front.url, [payload(1)])] == [200]
    finally:
        front.close()

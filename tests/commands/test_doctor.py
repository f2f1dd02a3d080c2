import json
from importlib import metadata

from slimecli.cli import run
from slimecli.commands import doctor


def test_this_environment_is_healthy(capsys):
    assert run(["doctor", "--json"]) == 0
    checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)}
    assert checks["torch"]["detail"] == metadata.version("torch")
    assert checks["torch build"]["status"] == "ok"
    assert checks["loopback"]["status"] == "ok"
    assert checks.keys() >= {"python", "ray", "disk", "/dev/shm", "GPUs", "sglang", "transformer-engine"}
    assert checks["megatron-core"]["detail"] == metadata.version("megatron-core")
    assert "only needed for fp8" in checks["transformer-engine"]["detail"]


def test_something_needed_that_is_missing_fails_with_its_fix(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_torch", lambda machine: iter(()))
    monkeypatch.setattr(doctor, "REQUIRED", {"torch": ">=99", "not-there-at-all": ">=1"})
    assert run(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "fail\ttorch" in out
    assert "not installed; needed: >=1" in out
    assert "pip install 'not-there-at-all>=1'" in err


def test_packages_that_do_not_go_together_are_named(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=99", "absent-package>=1"] if name == "ray" else [])
    found = list(doctor._conflicts())
    assert [c.name for c in found] == ["ray and numpy"]
    assert "needs numpy>=99" in found[0].detail

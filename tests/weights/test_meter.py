import sys

from slimecli.weights import meter
from slimecli.weights.convert import hf_to_torch_dist
from tests.models import tiny_model


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(meter.time, "monotonic", lambda: now[0])
    with meter.Meter("write", 10_000_000_000, 4_000_000_000) as shown:
        for _ in range(4):
            now[0] += 20.0
            shown.advance(1_000_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "write: 6.00 of 10.00 GB, 0.050 GB/s, 80 s left",
        "write: 8.00 of 10.00 GB, 0.050 GB/s, 40 s left",
    ]


def test_a_person_sees_both_halves_of_a_conversion(tmp_path, capsys, monkeypatch):
    hf = tiny_model(tmp_path / "hf")
    hf_to_torch_dist(hf, tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    hf_to_torch_dist(hf, tmp_path / "td")
    said = capsys.readouterr()
    assert "write" in said.err and "verify" in said.err and said.out == ""

import json
import re
import zipfile
from html.parser import HTMLParser

from slimecli.cli import run
from slimecli.observe.curves import curve
from tests.observe.made_run import make_run


class Page(HTMLParser):
    """Checks that tags are balanced and collects attributes that would load something."""

    VOID = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open, self.links, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_holds_everything(runs_root, capsys):
    made = make_run(runs_root / "demo")
    assert run(["report", "--run", "demo"]) == 0
    assert capsys.readouterr().out == f"{made.report_path}\n"
    text = made.report_path.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert "script" not in page.tags
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert page.tags.count("svg") >= 8
    for wanted in ("reward", "KL", "entropy", "answer length", "log-prob gap", "held-out accuracy: holdout"):
        assert wanted in text
    assert "&lt;0&gt; &amp; done" in text
    assert "&lt;4&gt; &amp; done" in text
    assert "<0> & done" not in text
    assert "90.0%" in text


def test_a_bundle_holds_records_and_no_weights(runs_root, tmp_path):
    made = make_run(runs_root / "demo")
    (made.weights_dir(4)).mkdir(parents=True)
    (made.weights_dir(4) / "model.safetensors").write_bytes(b"0" * 1000)
    made.new_attempt()
    made.log_path("driver").write_text("log")
    out = tmp_path / "b.zip"
    assert run(["report", "demo", "--out", str(tmp_path / "r.html"), "--bundle", str(out)]) == 0
    with zipfile.ZipFile(out) as archive:
        names = {n.removeprefix("demo/") for n in archive.namelist()}
    assert names >= {"run.json", "recipe.json", "metrics.jsonl", "stages/loop.json", "report.html"}
    assert "logs/attempt_001/driver.log" in names
    assert not [n for n in names if "safetensors" in n]


def test_curves_skip_gaps_and_place_points():
    text = curve("x", {"a": [(0, 0.0), (1, float("nan")), (2, 1.0), (3, 0.5)]})
    lines = re.findall(r'points="([^"]*)"', text)
    assert len(lines) == 2
    (first,) = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text)
    top = re.match(r"([\d.]+),([\d.]+)", lines[1])
    assert float(first[1]) > float(top[2])
    assert curve("x", {"a": [(0, float("nan"))]}) == ""
    assert "nan" not in curve("flat", {"a": [(0, 2.0), (1, 2.0)]})


def test_control_characters_of_an_answer_are_shown_as_pictures(runs_root):
    made = make_run(runs_root / "demo")
    path = sorted((made.root / "eval").glob("step_*.json"))[-1]
    record = json.loads(path.read_text())
    for modes in record["sets"].values():
        for result in modes.values():
            result["samples"][0]["response"] = "</pre><script>\x00\x1b[31m"
    path.write_text(json.dumps(record))
    assert run(["report", "--run", "demo"]) == 0
    text = made.report_path.read_text()
    assert "\x00" not in text and "\x1b" not in text and "<script" not in text
    assert "&lt;/pre&gt;&lt;script&gt;␀␛[31m" in text

"""The tables of benchmarks/README.md and docs/rollout.md are what stands in benchmarks/results."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


def kept(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def said(begin, text=PAGE):
    """Numbers of a table row, by the words that it begins with."""
    (row,) = re.findall(rf"^\| {re.escape(begin)} \|(.*)\|$", text, re.M)
    return [float(x) for x in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", row)]


def shown(*values):
    """(value, places), as they stand in a row."""
    return [round(value, places) for value, places in values]


def test_grpo_step_and_start_up():
    found = kept("grpo_step")
    for name, side in found["sides"].items():
        parts = [(side["seconds_per_step"], 3), (side["fastest_run"], 3), (side["cpu_seconds_per_step"], 3)]
        assert said(name)[:4] == shown(*parts, (side["response_length"], 1))
    assert said("slime")[4:] == shown((found["ratio"], 2))
    assert said("slime, 2 engines")[4:] == shown((found["ratio_2_engines"], 2))
    assert f"**{found['ratio_cpu']:.2f} times**" in PAGE
    words = {k: f"{v['cpu_seconds']:.2f}" for k, v in kept("cli_startup")["commands"].items()}
    told = re.search(r"\*\*Start-up\*\*.*?\n\n", PAGE + "\n\n", re.S)[0].replace("\n", " ")
    assert all(f"`{name}` {value}" in told for name, value in words.items() if name != "python -c pass")
    assert f"a bare Python {words['python -c pass']}" in told


def test_router_sync_and_conversion():
    names = {
        "direct": "engine asked directly",
        "builtin": "built-in",
        "smg": "smg 1.13.0",
        "sglang": "sglang-router 0.3.2",
    }
    for name, side in kept("router")["sides"].items():
        kind, _, policy = name.partition(" ")
        row = names[kind] + f", {policy.replace('_', ' ')}" * bool(policy)
        parts = [(side["ms_p50"], 2), (side["ms_p99"], 2), (side["requests_per_s"], 0)]
        parts += [(side["cpu_us_per_request"] / 1000, 2)] if policy else []
        assert said(row) == shown(*parts)
    for name, side in kept("sync")["shapes"]["0.6b"]["kinds"].items():
        parts = [(side["seconds"], 2), (side["gb_per_s"], 2), (side["cpu_seconds"], 2), (side["copies"], 1)]
        parts += [(side["pause_seconds"], 2), (side["bytes_sent"] / 1e9, 3)] if "bytes_sent" in side else []
        assert said(name) == shown(*parts)
    rows = {"copy": "plain copy", "instantiate and save": "mbridge and megatron-core: instantiate and save"}
    found = kept("convert")["sides"]
    for name, side in found.items():
        row = rows.get(name, f"slime, {name}" if name.startswith("to ") else name)
        parts = [(side["seconds"], 1), (side["cpu_seconds"], 1), (side["gb_per_s"], 2), (side["of_copy_speed"], 2)]
        direct = side["gb_per_s"] / found["direct copy"]["gb_per_s"]
        parts += [] if name in rows else [(direct, 2)]
        assert said(row) == shown(*parts, (side["peak_gb"], 2))


def test_rates_of_engine_and_trainer():
    works = {r["shape"]: r for r in kept("decode")["results"]}
    for shape, row in (
        ("quickstart", "quickstart (256 x 24 tokens)"),
        ("tiny", "tiny (64 x 64 tokens)"),
        ("0.6b", "0.6b (32 x 16 tokens, prompts of 16)"),
    ):
        own, *others = (
            works[shape]["sides"][n]["tokens_per_s"] for n in ("slime", "transformers", "transformers, no log-probs")
        )
        digits = 1 if shape == "0.6b" else 0
        parts = [(own, digits), (others[0], digits), (own / others[0], 2), (own / others[1], 2)]
        assert said(row) == shown(*parts, (100 * works[shape]["roofline_share"], 0))
    for work in kept("train_throughput")["results"]:
        row = f"{work['shape']} ({work['samples']} samples, {work['tokens']} tokens)"
        sides = [(work["sides"][n]["tokens_per_s"], 0) for n in ("slime", "padded")]
        peak = (100 * work["model_flops_utilisation"], 0)
        assert said(row) == shown(*sides, (work["ratio"], 2), (work["ratio_cpu"], 2), peak)
    rows = {"quickstart": "quickstart: 256 answers x 24 tokens", "tiny": "tiny (4.2 M): 64 answers x 64 tokens"}
    for work in kept("engine_vs_sglang")["results"]:
        sides = [(work["sides"][n]["tokens_per_s"], 0) for n in ("slime", "SGLang", "transformers")]
        assert said(rows[work["shape"]]) == shown(*sides, (work["ratio"], 1), (work["ratio_cpu"], 1))


def test_learning_and_overlap():
    table = re.search(r"\*\*Learning\*\*.*?\n\n(\|.*?)\n\n", PAGE, re.S)[1].splitlines()[2:]
    found = kept("learning")
    assert len(table) == len(found["settings"])
    for row, setting in zip(table, found["settings"], strict=True):
        _, _, end, worst, reached, _ = row.split("|")
        assert [float(end), float(worst)] == shown((setting["end"], 3), (setting["worst end"], 3)), row
        assert ("not" not in reached) is setting["learnt"], row
    costs = [s["cpu_s"] for s in found["settings"]]
    assert f"{min(costs):.0f} to {max(costs):.0f} CPU-seconds" in PAGE
    text = (ROOT / "docs" / "rollout.md").read_text(encoding="utf-8")
    rows = {
        "in turns": "in turns", "partial": "`partial`, 24 groups asked for", "1 ahead": "`max_staleness = 1`",
        "2 ahead": "`max_staleness = 2`", "1 ahead, partial": "`max_staleness = 1`, `partial`",
        "never stopping, 1": "`fully_async`, `max_staleness = 1`",
        "never stopping, 2": "`fully_async`, `max_staleness = 2`",
    }  # fmt: skip
    for name, side in kept("overlap")["sides"].items():
        faster, *ages = said(rows[name], text)
        assert abs(faster - side["of_turns"]) < 0.05 and ages == shown(
            (side["staleness_mean"], 1), (side["staleness_max"], 0)
        )

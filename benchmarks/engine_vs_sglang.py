"""Tokens per second of the embedded engine, SGLang on a CPU, and transformers' generate: same model, same requests.

    python -m benchmarks.engine_vs_sglang --sglang-python VENV/bin/python [--shape quickstart --shape tiny ...]

Both engines are servers in processes of their own, asked over HTTP by slime's client as the rollout asks them: one
request per prompt, all at once, log-probs included. transformers generates one batch in this process. One thread each.
CPU seconds are those of all processes of a side. Without a GPU SGLang runs without its kernels: this says what tests
and laptops get, and nothing of SGLang on GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import _common, _throughput
from benchmarks._common import Timing
from benchmarks._models import SHAPES, Shape, make_model, random_prompts
from benchmarks.decode import transformers_side

USUAL = ("quickstart", "tiny")


def ask_server(url: str, shape: Shape) -> Callable[[], None]:
    """Generate everything once over HTTP."""
    from slimecli.engines.http import HttpEngine

    sampling = {"temperature": 1.0, "max_new_tokens": shape.new_tokens, "ignore_eos": True}
    payloads = [
        {"input_ids": [p] * shape.group, "sampling_params": [sampling] * shape.group, "return_logprob": True}
        for p in random_prompts(shape)
    ]

    async def ask() -> None:
        engine = HttpEngine(url, timeout_s=1200)
        replies = await asyncio.gather(*(engine.generate(p) for p in payloads))
        lengths = {len(r["meta_info"]["output_token_logprobs"]) for group in replies for r in group}
        assert lengths == {shape.new_tokens}, f"{url} answered with {lengths} tokens"
        await engine.close()

    return lambda: asyncio.run(ask())


@contextlib.contextmanager
def embedded_server(folder: Path, shape: Shape) -> Iterator[tuple[str, int]]:
    """(URL, process) of the embedded engine."""
    from slimecli import env

    rows = shape.prompts * shape.group
    words = ["--model", str(folder), "--slots", str(rows), "--max-context", str(shape.prompt_tokens + shape.new_tokens)]
    command = [sys.executable, "-m", "slimecli.engines.embedded", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env.engine_env(1))
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process.pid
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def sglang_server(python: str, folder: Path, shape: Shape, log: Path) -> Iterator[tuple[str, int]]:
    """(URL, process) of SGLang."""
    from slimecli.engines.sglang.launch import start_server
    from slimecli.recipe import validate_recipe

    section = {"backend": "sglang", "python": python, "slots": shape.prompts * shape.group, "start_timeout_s": 900}
    context = {"max_prompt_tokens": shape.prompt_tokens}
    recipe = validate_recipe(
        {"engine": section, "data": context, "rollout": {"max_response_tokens": shape.new_tokens + 8}}
    )
    server = start_server(recipe, folder, log=log)
    try:
        yield server.url, server.pid
    finally:
        server.close()


def measure(name: str, shape: Shape, flags: Any, where: Path) -> dict[str, Any]:
    """All sides on one shape."""
    import torch

    folder = make_model(where / name, shape)
    with contextlib.ExitStack() as stack:
        servers = {"slime": stack.enter_context(embedded_server(folder, shape))}
        if flags.sglang_python:
            log = where / f"{name}.sglang.log"
            servers["SGLang"] = stack.enter_context(sglang_server(flags.sglang_python, folder, shape, log))
        works = {side: ask_server(url, shape) for side, (url, _) in servers.items()}
        works["transformers"] = transformers_side(folder, shape, "cpu", torch.float32)["transformers"]
        processes = {side: pid for side, (_, pid) in servers.items()}
        timings = interleave(works, processes, flags.repeats)
    rows = shape.prompts * shape.group
    tokens = rows * shape.new_tokens
    compared = _throughput.compare(timings, tokens, "SGLang" if flags.sglang_python else "transformers")
    return compared | {
        "shape": name, "rows": rows, "prompt_tokens": shape.prompt_tokens, "new_tokens": shape.new_tokens,
    }  # fmt: skip


def interleave(
    works: dict[str, Callable[[], None]], processes: dict[str, int], repeats: int
) -> dict[str, list[Timing]]:
    """As _common.interleave; processor time is this process's and, where a side has one, its server's."""
    timings: dict[str, list[Timing]] = {side: [] for side in works}
    for number in range(-1, repeats):
        for side, work in works.items():
            before = _common.tree_cpu_seconds(processes[side]) if side in processes else 0.0
            timing = _common.timed(work)
            after = _common.tree_cpu_seconds(processes[side]) if side in processes else 0.0
            if number >= 0:
                timings[side].append(replace(timing, cpu=timing.cpu + after - before))
    return timings


def main() -> None:
    """Measure the shapes asked for."""
    flags_of = _common.parser(__doc__.partition("\n")[0])
    flags_of.add_argument("--sglang-python", default="", help="interpreter with SGLang; empty: it is left out")
    flags_of.add_argument("--shape", action="append", choices=list(SHAPES), help="repeatable")
    flags = flags_of.parse_args()
    from slimecli import env

    env.set_threads(1)
    env.quiet_libraries()
    shapes = {name: SHAPES[name] for name in flags.shape or USUAL}
    if flags.smoke:
        flags.repeats = 1
        shapes = {"quickstart": replace(SHAPES["quickstart"], prompts=2, group=2, new_tokens=4)}
    with tempfile.TemporaryDirectory() as scratch:
        results = [measure(name, shape, flags, Path(scratch)) for name, shape in shapes.items()]
    against = "SGLang" if flags.sglang_python else "transformers generate"
    for result in results:
        rows = [{"side": side, **values} for side, values in result["sides"].items()]
        told = f"{result['rows']} answers x {result['new_tokens']} tokens: slime is {result['ratio']:.2f}x {against}"
        _common.show(f"{result['shape']}: {told} (CPU time {result['ratio_cpu']:.2f}x)", rows)
    ratio = statistics.geometric_mean(result["ratio"] for result in results)
    summary = {"ratio": ratio, "against": against, "compared": bool(flags.sglang_python), "results": results}
    _common.finish("engine_vs_sglang", summary, save=flags.save)


if __name__ == "__main__":
    main()

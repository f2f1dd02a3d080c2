"""Answers to a stream of prompts, without a run: what `slime rollout < prompts.jsonl` does.

Prompts are read, asked and written as a stream: `rollout.batch_size` of them are held at a time, however many come.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from slimecli.data_tools.selection import Selection
    from slimecli.errors import DataError
    from slimecli.recipe import Recipe
    from slimecli.rollout.appended import AppendedFile
    from slimecli.session import Session
    from slimecli.types import Group, Sample


BROKEN = "broken prompt"
"""why rows are left out with data.skip_broken"""


@dataclass(frozen=True)
class Shard:
    """Every count-th prompt from the index-th on; index from 1."""

    index: int
    count: int

    def has(self, row: int) -> bool:
        """Whether row number `row` (from 0) belongs to it."""
        return row % self.count == self.index - 1


def parse_shard(text: str) -> Shard:
    """`i/n` with i from 1 to n."""
    from slimecli.errors import UsageError

    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise UsageError(f"--shard {text!r} is not i/n with i from 1 to n", "write --shard 1/4 ... --shard 4/4")
    return Shard(int(index), int(count))


@dataclass
class _Row:
    """One row of the input on its way."""

    number: int
    digest: str
    """`chain` up to this row"""
    sample: Sample | None
    """None: not asked, as it is broken"""
    broken: list[DataError]
    """why it and the lines before it, back to the row before, cannot be read"""


def rollout_file(
    prompts: str, out: str, recipe: Recipe, model: str, *, selection: str = "samples", shard: str = "1/1"
) -> dict[str, Any]:
    """Answer every prompt of a file (or stdin) with a model; nothing of a run is needed.

    Args:
        prompts: JSONL, CSV or parquet file, or folder of a data set, with optional slice; `-` is JSONL on stdin.
        out: JSONL file, which is appended to and continued after a kill; or `-` for stdout.
        model: HF folder, registry name, or URL of a running server.
        selection: `samples` or `sft`, with `:RULE`; see slimecli.data_tools.selection.
        shard: `i/n`: every n-th prompt from the i-th on.

    Returns: {"prompts", "samples", "written", "failed", "left": {reason: samples}, "out", "resumed_at"}.
    Raises PartialError when answers failed, DataError when every prompt was left out as broken.
    """
    from slimecli import console
    from slimecli.commands._targets import open_target
    from slimecli.data_tools.selection import parse_selection
    from slimecli.engines.seats import EnginesLostError
    from slimecli.errors import InterruptedRunError, PartialError, SlimeError
    from slimecli.weights.datasets import localise

    chosen, part = parse_selection(selection), parse_shard(shard)
    if recipe.rollout.dynamic_filter:
        console.note("rollout.dynamic_filter chooses what a run trains on; here `--as FORM:RULE` does")
    prompts = localise(prompts)
    folder, recipe = open_target(model, recipe)
    begun = "with --out FILE it goes on where it was" if out == "-" else f"{out} is continued"
    again = f"give the same command again: {begun}"
    try:
        if out == "-":
            result = _answer(prompts, recipe, folder, chosen, part, None)
        else:
            from slimecli.rollout.appended import AppendedFile

            with AppendedFile(Path(out), _identity(recipe, model, folder, selection, shard)) as file:
                result = _answer(prompts, recipe, folder, chosen, part, file)
                file.commit(done=True)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted", again) from None
    except EnginesLostError as error:
        raise SlimeError(error.what, f"start the server, then {again}") from None
    if result["failed"]:
        written = "they are in the output with status `failed`" if selection == "samples" else "they are not written"
        raise PartialError(
            f"{result['failed']} of {result['samples']} answers failed; {written}{_told(result.pop('failure'))}",
            "see metadata.failure of such samples",
        )
    result.pop("failure")
    return {**result, "out": out}


def _told(failure: str) -> str:
    return f"; the first: {failure}" if failure else ""


def _identity(recipe: Recipe, model: str, folder: Path, selection: str, shard: str) -> dict[str, Any]:
    """What the written lines depend on, apart from the prompts."""
    from slimecli import files
    from slimecli.data_tools.rewards.version import scorer_version
    from slimecli.rollout.eval_spec import generate_spec

    sections = recipe.model_dump(mode="json", include={"seed", "data", "rollout", "reward"})
    for name in ("batch_size", "concurrency", "request_timeout_s", "max_retries", "max_failed_fraction"):
        sections["rollout"].pop(name)
    for name in ("train", "holdout", "count", "source", "source_args", "shuffle"):
        sections["data"].pop(name)
    weights = {p.name: files.glance(p) for kind in _OF_A_MODEL for p in sorted(folder.glob(kind))}
    code = {"generate": generate_spec(recipe), "scorer": scorer_version(recipe.reward, set())}
    return {"model": model, "weights": weights, "as": selection, "shard": shard, **code, **sections}


_OF_A_MODEL = ("*.safetensors", "config.json", "tokenizer*.json", "*.jinja")
"""files of a model's folder that answers depend on"""


def _answer(
    prompts: str, recipe: Recipe, folder: Path, chosen: Selection, part: Shard, file: AppendedFile | None
) -> dict[str, Any]:
    import tempfile

    from slimecli.rollout.generate import failure
    from slimecli.rundir import RunDir
    from slimecli.session import Session
    from slimecli.types import SampleStatus

    counts = Counter(file.counts if file else {})
    begun = file.rows if file else 0
    trailing: list[DataError] = []
    first: DataError | None = None
    failed: list[Sample] = []
    with tempfile.TemporaryDirectory() as scratch:
        run = RunDir(Path(scratch))
        run.model_dir.parent.mkdir()
        run.model_dir.symlink_to(folder.resolve())
        with Session(run, recipe) as session:
            rows = _rows(prompts, recipe, session.tokenizer, part, file, trailing)
            for row, group in _groups(rows, session, folder):
                first = first or next(iter(row.broken), None)
                counts[f"left: {BROKEN}"] += len(row.broken)
                counts["prompts"] += bool(group)
                counts["samples"] += len(group)
                broken = [s for s in group if s.status is SampleStatus.FAILED]
                counts["failed"] += len(broken)
                failed = failed or broken[:1]
                left: Counter[str] = Counter()
                lines = [
                    chosen.line(s, recipe.data.tool_key) for s in chosen.pick(group, recipe.reward.key or None, left)
                ]
                counts["written"] += len(lines)
                counts.update({f"left: {reason}": n for reason, n in left.items() if n})
                if file is not None:
                    file.add(lines, row.number + 1, row.digest, dict(counts))
                    continue
                for line in lines:
                    sys.stdout.write(line + "\n")
                sys.stdout.flush()
    counts[f"left: {BROKEN}"] += len(trailing)
    _refuse_nothing(counts, first or next(iter(trailing), None))
    dropped = {k.removeprefix("left: "): n for k, n in sorted(counts.items()) if n and k.startswith("left: ")}
    totals = {k: counts[k] for k in ("prompts", "samples", "written", "failed")}
    told = failure(failed[0]) if failed else ""
    return {**totals, "left": dropped, "resumed_at": begun, "failure": told}


def _refuse_nothing(counts: Counter[str], first: DataError | None) -> None:
    """Doing nothing is no success: raise if there were prompts, and all of them were left out."""
    from slimecli.errors import DataError

    left = counts[f"left: {BROKEN}"]
    if left and not counts["prompts"]:
        told = f"; the first: {first.what}" if first is not None else ""
        raise DataError(
            f"every prompt was left out as broken ({left} of {left}){told}",
            first.fix if first is not None else "see the prompts' columns and lengths",
        )


def _rows(
    prompts: str, recipe: Recipe, tokenizer: Any, part: Shard, file: AppendedFile | None, trailing: list[DataError]
) -> Iterator[_Row]:
    """The rows that are still to be done, in order; those that `file` has are only compared with what they were.

    Broken lines belong to the row after them; those behind the last row end up in `trailing`.
    """
    import orjson

    from slimecli.data_tools.formats import placed_rows, read_lines
    from slimecli.data_tools.prompts import as_asked
    from slimecli.errors import DataError, UsageError
    from slimecli.rollout.appended import NO_ROWS, chain

    broken: list[DataError] = []
    on_broken = broken.append if recipe.data.skip_broken else None
    named = (
        read_lines(sys.stdin.buffer, "<stdin>", on_broken)
        if prompts == "-"
        else placed_rows(prompts, on_broken=on_broken)
    )
    digest, done = NO_ROWS, file.rows if file else 0
    number = -1
    for number, (where, raw) in enumerate(named):
        digest = chain(digest, orjson.dumps(raw, option=orjson.OPT_SORT_KEYS, default=str))
        before = broken[:]
        broken.clear()
        if number < done:
            if number == done - 1 and file is not None and digest != file.digest:
                break
            continue
        if not part.has(number):
            continue
        sample = None
        try:
            sample = as_asked(raw, recipe.data, tokenizer, where)
        except DataError as error:
            if not recipe.data.skip_broken:
                raise
            before.append(error)
        yield _Row(number, digest, sample, before)
    if part.has(number + 1):
        trailing += broken
    if number < done - 1 or (done and number == done - 1 and file is not None and digest != file.digest):
        raise UsageError(
            f"the prompts are not those that {file.path if file else ''} was begun with (compared up to row {done})",
            "feed the same prompts, or choose another --out file",
        )


def _groups(rows: Iterator[_Row], session: Session, folder: Path) -> Iterator[tuple[_Row, Group]]:
    """Answered groups in the order of their prompts; an empty group for a row that is not asked."""
    import asyncio
    from collections import deque

    from slimecli.errors import SlimeError
    from slimecli.rollout.sampling import rollout_sampling, rollout_seed

    recipe = session.recipe
    n, window = recipe.rollout.n_samples_per_prompt, recipe.rollout.batch_size
    generator = session.generator(session.engine(folder))
    sampling = rollout_sampling(recipe, session.stop_token_ids)

    async def answer(row: _Row) -> Group:
        if row.sample is None:
            return []
        group = row.sample.copies(n)
        for i, sample in enumerate(group):
            sample.group_index, sample.index = row.number, row.number * n + i
        seeds = [{"sampling_seed": rollout_seed(recipe, 0, row.number, i)} for i in range(n)]
        return await generator.group(group, [sampling | seed for seed in seeds])

    waiting: deque[tuple[_Row, asyncio.Task[Group]]] = deque()
    broken: list[SlimeError] = []

    async def first() -> Group:
        """The oldest group, after as many are begun as may be held; what comes before a broken row is answered."""
        try:
            while not broken and len(waiting) < window and (row := next(rows, None)) is not None:
                task = asyncio.create_task(answer(row))
                task.add_done_callback(_seen)
                waiting.append((row, task))
        except SlimeError as error:
            broken.append(error)
        return await waiting[0][1] if waiting else []

    while True:
        group = session.aio.run(first())
        if not waiting:
            break
        row, _ = waiting.popleft()
        yield row, group
    if broken:
        raise broken[0]


def _seen(task: asyncio.Task[Group]) -> None:
    """Where one group's error ends the command, asyncio need not print those of the groups behind it."""
    if not task.cancelled():
        task.exception()

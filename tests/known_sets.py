"""Tiny local copies of well-known data sets, with the columns and the folder layout of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

ROWS = 24


def _parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def gsm8k(folder: Path) -> list[str]:
    """main/{train,test}: question, answer."""
    rows = [{"question": f"{i} and 3?", "answer": f"<<{i}+3={i + 3}>>\n#### 1,{i + 100}"} for i in range(ROWS + 2)]
    _parquet(folder / "main" / "train-00000-of-00001.parquet", rows[:ROWS])
    _parquet(folder / "main" / "test-00000-of-00001.parquet", rows[ROWS:])
    _parquet(folder / "socratic" / "train-00000-of-00001.parquet", rows[:1])
    return [f"data.train={folder}#main/train", f"eval.sets.gsm8k={folder}#main/test"]


def math(folder: Path) -> list[str]:
    """train: problem, level, solution, type; MATH-500: problem, solution, answer, ..."""
    rows = [
        {"problem": f"Find {i}.", "level": "Level 1", "solution": rf"So \boxed{{{i}}}.", "type": "Algebra"}
        for i in range(ROWS)
    ]
    _parquet(folder / "data" / "train-00000-of-00001.parquet", rows)
    test = [{"problem": "Find x.", "solution": "So", "answer": "7", "subject": "Algebra", "level": 1, "unique_id": "a"}]
    _lines(folder / "test.jsonl", test)
    return [f"data.train={folder}#train", f"eval.sets.math500.path={folder / 'test.jsonl'}"]


def dapo_math_17k(folder: Path) -> list[str]:
    """data_source, prompt, ability, reward_model, extra_info; AIME: id, problem, solution, answer, url, year."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"Find {i}. End with Answer: $Answer."}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"row-{i}"},
        }
        for i in range(ROWS)
    ]
    _parquet(folder / "data" / "dapo-math-17k.parquet", rows)
    return [f"data.train={folder}", f"eval.sets.aime2024.path={aime_rows(folder / 'aime')}#train"]


def aime_rows(folder: Path) -> Path:
    row = {"id": 60, "problem": "Find y.", "solution": "So", "answer": "073", "url": "", "year": "2024"}
    _parquet(folder / "data" / "train-00000-of-00001.parquet", [row])
    return folder


def deepscaler(folder: Path) -> list[str]:
    """deepscaler.json: a list of problem, answer, solution."""
    (folder / "copy").mkdir()
    rows = [{"problem": f"Find {i}.", "answer": str(i), "solution": "So"} for i in range(ROWS)]
    (folder / "copy" / "deepscaler.json").write_text(json.dumps(rows))
    return [f"data.train={folder / 'copy'}", f"eval.sets.aime2024.path={aime_rows(folder / 'aime')}#train"]


def aime(folder: Path) -> list[str]:
    """Two sets of problem, answer."""
    _lines(folder / "aime25" / "test.jsonl", [{"problem": "Find z.", "answer": "70", "id": "0"}])
    return [f"eval.sets.aime2024={aime_rows(folder / 'aime24')}#train", f"eval.sets.aime2025={folder / 'aime25'}#test"]


def gpqa(folder: Path) -> list[str]:
    """gpqa_diamond.csv: many columns, of which five are read."""
    wrong = ",".join(f"Incorrect Answer {i}" for i in (1, 2, 3))
    lines = [f"Record ID,Question,Correct Answer,{wrong},Explanation"]
    lines += [f'rec{i},"Which, of these?",right {i},"wrong, a",wrong b,wrong c,"because\nof it"' for i in range(4)]
    (folder / "gpqa_diamond.csv").write_text("\n".join(lines) + "\n")
    return [f"eval.sets.gpqa={folder / 'gpqa_diamond.csv'}"]


def search_r1(folder: Path) -> list[str]:
    """nq/{train,test}.jsonl: id, question, golden_answers; and a corpus to search."""
    rows = [
        {"id": f"train_{i}", "question": f"Who is {i}?", "golden_answers": [f"Ann {i}", f"A. {i}"]} for i in range(ROWS)
    ]
    _lines(folder / "copy" / "nq" / "train.jsonl", rows)
    _lines(folder / "copy" / "nq" / "test.jsonl", rows[:2])
    _lines(folder / "corpus.jsonl", [{"title": "Ann", "text": "Ann 1 is a person"}])
    sets = [f"data.train={folder / 'copy'}#nq/train", f"eval.sets.nq={folder / 'copy'}#nq/test"]
    return [*sets, f"tools.corpus={folder / 'corpus.jsonl'}"]


def tool_calls(folder: Path) -> list[str]:
    """id, query, answers, tools: the last two as JSON text."""
    tools = [
        {"name": "add", "description": "sum", "parameters": {"a": {"type": "int"}, "b": {"type": "int, optional"}}}
    ]
    rows = [
        {
            "id": i,
            "query": f"Add {i} and 3",
            "answers": json.dumps([{"name": "add", "arguments": {"a": i, "b": 3}}]),
            "tools": json.dumps(tools),
        }
        for i in range(ROWS)
    ]
    (folder / "copy").mkdir()
    (folder / "copy" / "xlam_function_calling_60k.json").write_text(json.dumps(rows))
    return [f"data.train={folder / 'copy'}"]


KNOWN = {
    "gsm8k": gsm8k,
    "math": math,
    "dapo-math-17k": dapo_math_17k,
    "deepscaler": deepscaler,
    "aime": aime,
    "gpqa": gpqa,
    "search-r1": search_r1,
    "tool-calls": tool_calls,
}
"""recipe -> function that makes a local copy in a folder and returns the overrides that point to it"""

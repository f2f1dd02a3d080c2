"""Folders in the layout of the hub's data sets: which files make up a split.

README.md's `configs` decide where there are some; else names do, as on the hub: `train`, `test`, `validation` and their
like as words of a file's or folder's name, and a folder below the top (but `data`) is a subset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimecli.errors import DataError, nearest

SUFFIXES = (".jsonl", ".parquet", ".csv", ".json")
"""files that hold rows"""
DEFAULT = "default"
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}

Layout = dict[str, dict[str, list[Path]]]
"""subset -> split -> files, in order"""


def dataset_files(folder: Path, choice: str) -> list[Path]:
    """The files of a split.

    Args:
        choice: `SUBSET/SPLIT`, either alone, or empty; a subset may be left out where there is one, a split where there
            is one or a `train`.
    """
    layout = folder_layout(folder)
    if not layout:
        raise DataError(f"{folder} holds no {', '.join(SUFFIXES)} file", "name the folder of the data set itself")
    first, slash, second = choice.partition("/")
    subset, split = (first, second) if slash else ("", first)
    if not slash and first in layout and not any(first in splits for splits in layout.values()):
        subset, split = first, ""
    if not subset:
        names = list(layout)
        subset = names[0] if len(names) == 1 else DEFAULT
        if subset not in layout:
            known = ", ".join(names)
            raise DataError(f"{folder} has several subsets: {known}", f"choose one: {folder}#{names[0]}/train")
    splits = _named(layout, subset, f"{folder} has no subset")
    wanted = split or ("train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else "train")
    files: list[Path] = _named(splits, wanted, f"{folder} has no split")
    return files


def _named(table: dict[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise DataError(f"{what} {name!r}{nearest(name, list(table))}", f"it has: {', '.join(table)}")
    return table[name]


def folder_layout(folder: Path) -> Layout:
    """Every subset and split of a folder."""
    declared = declared_files(folder / "README.md")
    if not declared:
        return _by_name(folder)
    layout: Layout = {}
    for subset, splits in declared.items():
        for split, patterns in splits.items():
            found = {p for pattern in patterns for p in folder.glob(pattern) if p.suffix in SUFFIXES}
            if found:
                layout.setdefault(subset, {})[split] = sorted(found)
    return layout


def declared_files(readme: Path) -> dict[str, dict[str, list[str]]]:
    """subset -> split -> glob patterns, as the `configs` of a data set's README.md state them; {} without any."""
    import yaml

    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    if found is None:
        return {}
    try:
        head = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        raise DataError(f"{readme} has an unreadable head: {error}", "mend or remove the part between ---") from None
    configs = head.get("configs") if isinstance(head, dict) else None
    declared: dict[str, dict[str, list[str]]] = {}
    for config in configs or ():
        stated = config.get("data_files")
        if not stated:
            continue
        entries = stated if isinstance(stated, list) else [stated]
        splits = declared.setdefault(str(config.get("config_name", DEFAULT)), {})
        for entry in entries:
            split, path = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
            patterns = [path] if isinstance(path, str) else list(path)
            base = str(config.get("data_dir") or "")
            splits.setdefault(str(split), []).extend(f"{base}/{p}" if base else p for p in patterns)
    return declared


def _by_name(folder: Path) -> Layout:
    layout: Layout = {}
    files = sorted(p for suffix in SUFFIXES for p in folder.rglob(f"*{suffix}"))
    for path in files:
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") for part in parts):
            continue
        above = [part for part in parts[:-1] if part != "data" and not _split_of([part])]
        split = _split_of([path.stem, *reversed(parts[:-1])]) or "train"
        layout.setdefault("/".join(above) or DEFAULT, {}).setdefault(split, []).append(path)
    return layout


def _split_of(names: Sequence[str]) -> str:
    """The split that the first telling name speaks of; words count, not parts of words."""
    for name in names:
        words = re.split(r"[^a-z]+", name.lower())
        for split, keywords in _SPLITS.items():
            if any(word in keywords for word in words):
                return split
    return ""

"""The file tree in README is true: every path exists, and every folder of the library is in it."""

import re

from tests.architecture.sources import ROOT, library_files

IGNORED = {"__pycache__", "completions"}


def tree_paths() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```tree\n(.*?)```", text, re.DOTALL)
    stack: list[str] = []
    paths = []
    for line in block.splitlines():
        name = line.split("#")[0].rstrip()
        if not name.strip():
            continue
        depth = (len(name) - len(name.lstrip())) // 2
        stack[depth:] = [name.strip().rstrip("/")]
        paths.append("/".join(stack))
    return paths


def test_every_path_of_the_tree_exists():
    paths = tree_paths()
    assert len(paths) > 30
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_every_library_folder_and_top_file_is_in_the_tree():
    paths = set(tree_paths())
    folders = {p.parent.relative_to(ROOT).as_posix() for p in library_files()}
    shown = {f for f in folders if not f.split("/")[-1].startswith("_")}
    assert shown - paths == set()
    files = {f"slimecli/{p.name}" for p in (ROOT / "slimecli").glob("*.py") if p.name != "__init__.py"}
    assert files - paths == set()


def test_the_tree_has_a_word_on_every_line():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```tree\n(.*?)```", text, re.DOTALL)
    assert all("#" in line for line in block.splitlines() if line.strip())

import re

import pytest

from slimecli.errors import DataError, UsageError
from slimecli.lookup import look_up
from tests.architecture.sources import library_files

REGISTRY = {"dumps": "json:dumps", "loads": "json:loads"}


def test_a_name_becomes_the_object_behind_it():
    assert look_up(REGISTRY, "loads", "function")("[1]") == [1]


def test_a_wrong_name_is_told_with_the_nearest_and_all_others():
    with pytest.raises(UsageError) as caught:
        look_up(REGISTRY, "dunps", "function", "take one of {known}, or write {your own}")
    assert caught.value.what == "no function 'dunps' (did you mean 'dumps'?)"
    assert caught.value.fix == "take one of dumps, loads, or write {your own}"
    with pytest.raises(DataError, match="known: dumps, loads"):
        look_up(REGISTRY, "", "function", error=DataError)


def test_nobody_else_resolves_module_and_attribute():
    written = re.compile(r"getattr\(\s*(importlib\.)?import_module\(")
    assert [p.name for p in library_files() if written.search(p.read_text(encoding="utf-8"))] == ["lookup.py"]

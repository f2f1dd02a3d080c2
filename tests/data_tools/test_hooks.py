import pytest

from slimecli.data_tools.hooks import load_hook
from slimecli.errors import UsageError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "state = []\nconstant = 3\n\ndef good(args, sample, **kw):\n    return 1.0\n\n"
        "def other(args, sample):\n    return state\n\ndef bad(x):\n    return x\n"
    )
    (tmp_path / "broken.py").write_text("import json\nraise RuntimeError('boom')\n")
    return tmp_path


def test_three_spellings(folder):
    (folder / "slime_test_pkg").mkdir()
    (folder / "slime_test_pkg" / "__init__.py").write_text("")
    (folder / "slime_test_pkg" / "hooks.py").write_text("def fn(args, sample):\n    return 2\n")
    for path in ("mine.py:good", f"{folder}/mine.py:good"):
        assert load_hook(path, ("args", "sample"))(None, None) == 1.0
    for path in ("slime_test_pkg.hooks:fn", "slime_test_pkg.hooks.fn"):
        assert load_hook(path, ("args", "sample"))(None, None) == 2


def test_two_hooks_of_a_file_share_its_state(folder):
    first = load_hook("mine.py:other", ("args", "sample"))
    first(None, None).append(1)
    assert load_hook("mine.py:other", ("args", "sample"))(None, None) == [1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine.py:goood", "did you mean 'good'?"),
        ("none.py:good", "no file"),
        ("no_such_module_xyz:good", "no module 'no_such_module_xyz'"),
        ("json.no_such_thing", "has no 'no_such_thing'"),
        ("mine.py:constant", "is a int, not a function"),
        ("mine.py:bad", "has the signature (x), but it is called with (args, sample)"),
        ("broken.py:good", "RuntimeError: boom"),
        ("justaname", "does not name a function"),
        ("mine.py", "does not name a function"),
    ],
)
def test_mistakes(folder, path, message):
    with pytest.raises(UsageError) as caught:
        load_hook(path, ("args", "sample"))
    assert message in caught.value.what and caught.value.fix

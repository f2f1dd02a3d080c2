"""Wheel and sdist hold everything, and put one name into site-packages."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import bootstrap
from slimecli import __version__
from slimecli.commands.doctor import REQUIRED
from tests.architecture.sources import ROOT, library_files, module_name

DATA = {
    "slimecli/recipes/quickstart.toml",
    "slimecli/model_specs/qwen3.toml",
}
BUILD = "from setuptools import build_meta as b; print(b.{hook}(r'{out}'))"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(names in the wheel, names in the sdist), built from a copy so that the working tree stays as it is."""
    source = tmp_path_factory.mktemp("source") / "slime"
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "build", "dist", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    out = tmp_path_factory.mktemp("out")
    for hook in ("build_wheel", "build_sdist"):
        code = BUILD.format(hook=hook, out=out)
        done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
    with tarfile.open(sdist) as archive:
        in_sdist = [name.partition("/")[2] for name in archive.getnames()]
    return set(in_wheel), set(in_sdist)


def test_the_wheel_holds_every_module_and_data_file(built):
    wheel, _ = built
    modules = {
        module_name(p).replace(".", "/") + ("/__init__.py" if p.name == "__init__.py" else ".py")
        for p in library_files()
    }
    data = {p.relative_to(ROOT).as_posix() for p in (ROOT / "slimecli" / "recipes").glob("*.toml")}
    data |= {f"slimecli/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "model_specs").glob("*.toml")}
    data |= {f"slimecli/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "data_tools").rglob("*.jinja")}
    assert data >= DATA
    assert (modules | data) - wheel == set()


def test_the_wheel_leaks_no_other_name(built):
    wheel, _ = built
    tops = {name.partition("/")[0] for name in wheel}
    assert tops == {"slimecli", f"slimecli-{__version__}.dist-info"}


def test_the_sdist_can_be_built_again(built):
    _, sdist = built
    needed = {
        "pyproject.toml",
        "README.md",
        "slimecli/cli.py",
        "slimecli/commands/run.py",
        "slimecli/model_specs/qwen3.toml",
    }
    assert needed - sdist == set()


def test_doctor_knows_the_dependencies_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = {f"{name}{versions}" for name, versions in REQUIRED.items()}
    assert stated == set(project["dependencies"])
    assert project["version"] == __version__


def test_package_data_patterns_reach_every_data_file():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = [p for ps in tables["package-data"].values() for p in ps]
    assert patterns
    others = [p for f in ("commands", "model_specs", "data_tools") for p in (ROOT / f).rglob("*") if p.is_file()]
    kinds = {p.suffix for p in others if "__pycache__" not in p.parts} - {".py", ".pyc"}
    assert kinds <= {".toml", ".jinja"}, kinds


def test_the_container_is_made_of_what_is_here():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    sources = [word for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for word in line.split()[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    assert re.findall(r"torch==[\d.]+", text) == [bootstrap.TORCH]
    cuda = re.findall(r"nvidia/cuda:(\d+)\.(\d+)\.\d+-runtime.*/whl/cu(\d+)", text)
    assert [major + minor for major, minor, _ in cuda] == [index for _, _, index in cuda] != []
    extras = re.findall(r"EXTRAS=\[(\w+)\]", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras and set(extras) <= set(known)

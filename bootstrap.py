"""Set slime up and use it, from nothing but Python 3.11+ and pip.

    python3 bootstrap.py run  [--venv DIR] [arguments of `slime run`]    set up, then the quickstart
    python3 bootstrap.py test [--venv DIR] [--sglang] [arguments of pytest]
                                                  set up with test tools, then the tests (all of them in two
                                                  processes); with those of a real SGLang
    python3 bootstrap.py sglang [--venv DIR]      an environment with SGLang alone, for engine.python and its tests

A second call skips what is installed already. Without an NVIDIA GPU the CPU build of torch is installed, and nothing of
CUDA. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
"""the version that the tests ran with; pyproject.toml says which others work"""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SGLANG = "sglang==0.5.21"
"""the version that the tests ran with; it asks for exactly this torch"""
SGLANG_VENV = ROOT / ".venv-sglang"
SGLANG_NEEDS = (
    *("aiohttp==3.14.5", "apache-tvm-ffi==0.1.11", "dill==0.4.1", "distro==1.9.0", "einops==0.8.2", "fastapi==0.165.0"),
    *("gguf==0.19.0", "ipython==9.18.1", "llguidance==1.9.1", "loguru==0.7.3", "mistral_common==1.13.1"),
    *("msgspec==0.22.0", "numpy==2.3.5", "nvidia-ml-py==13.615.71", "openai==2.8.0", "orjson==3.13.0"),
    *("packaging==26.3", "partial-json-parser==0.2.1.1.post7", "pillow==13.0.0", "prometheus-client==0.26.0"),
    *("psutil==7.2.2", "pybase64==1.5.1", "pydantic==2.14.3", "python-multipart==0.0.34", "pyzmq==27.3.0"),
    *("requests==2.34.2", "scipy==1.17.1", "sentencepiece==0.2.1", "setproctitle==1.3.8", "soundfile==0.13.1"),
    *("tiktoken==0.14.0", "tokenizers==0.23.2", "transformers==5.19.0", "uvicorn==0.54.0", "uvloop==0.23.0"),
    *("watchfiles==1.3.0", "xxhash==4.1.0", "zstandard==0.25.0"),
)
"""what its server imports on a CPU, as the tests ran with it: a new version of one of them shall not stop the tests"""
SGLANG_ALONE = (
    *("torchvision==0.28.0", "compressed-tensors==0.18.0", "xgrammar==0.2.7"),
    *("mooncake-transfer-engine-non-cuda==0.3.13.post1", SGLANG),
)
"""installed without what they ask for: CUDA packages, several gigabytes; Mooncake carries caches between servers"""
PAUSES = (5, 30)
"""between tries of a pip that fails (seconds)"""
HALF = (
    *("agents", "cluster", "engines", "equivalence", "examples", "rollout", "serving", "shim", "sync"),
    *("test_docs_offline.py", "test_readme.py"),
)
"""of tests/, what takes about as long as the rest: the one runs beside the other, on two cores"""
STAMP = "slime-bootstrap.txt"
"""file in the virtual environment that says for which inputs it was made"""


def fail(what: str, fix: str) -> None:
    """Say what is wrong and stop."""
    sys.exit(f"error: {what}\n  fix: {fix}")


def say(text: str) -> None:
    """One line of progress."""
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


def has_gpu() -> bool:
    """True when an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def call(*command: str) -> None:
    """Run a pip that must work; once more after each of PAUSES, for downloads fail now and then."""
    told = " ".join(command)
    for pause in (*PAUSES, None):
        say(told)
        if subprocess.run(command, cwd=ROOT, check=False).returncode == 0:
            return
        if pause is not None:
            say(f"that failed; once more in {pause} s")
            time.sleep(pause)
    fail(
        f"no test has failed: pip has, {len(PAUSES) + 1} times: `{told}`",
        "read its output above: a package index that does not answer, a version that it lacks for this Python or "
        "machine, or a full disk; the environment is kept, and a new call goes on",
    )


def attempt(*command: str) -> bool:
    """Run a command that may fail; its output is shown only by the next try."""
    say(" ".join(command))
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def make_venv(venv: Path) -> Path:
    """The environment's Python; the environment is made if it is not there."""
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"making the virtual environment {venv}")
        done = subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False)
        if done.returncode:
            fail("`python3 -m venv` does not work here", "install it, e.g. `apt install python3-venv`")
    return python


def fingerprint(extra: str, gpu: bool) -> str:
    """What the installation depends on."""
    text = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "bootstrap.py")]
    return hashlib.sha256("\0".join([*text, extra, str(gpu), str(ROOT), sys.version]).encode()).hexdigest()


def install_torch(pip: list[str], gpu: bool) -> None:
    """CPU torch where there is no NVIDIA GPU, else the default build."""
    if gpu or sys.platform == "darwin":
        call(*pip, "install", TORCH)
        return
    # a `+cpu` build is never the CUDA one, wherever pip finds it; PyTorch's index is asked if pip's own sources lack it
    if attempt(*pip, "install", f"{TORCH}+cpu"):
        return
    call(*pip, "install", TORCH, "--index-url", CPU_INDEX)


def refuse_cuda(python: Path) -> None:
    """A machine without a GPU must not have been given gigabytes of CUDA packages (nvidia-ml-py is plain Python)."""
    code = (
        "from importlib import metadata\n"
        "print(*sorted({str(d.metadata['Name']) for d in metadata.distributions()"
        " if str(d.metadata['Name']).lower().startswith('nvidia-')} - {'nvidia-ml-py'}))"
    )
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if found:
        fail(
            f"CUDA packages were installed on a machine without an NVIDIA GPU: {', '.join(found)}",
            f"delete {python.parent.parent}, and report which package asked for them",
        )


def install(venv: Path, extra: str) -> Path:
    """Make or reuse the environment and return its Python."""
    gpu = has_gpu()
    python, stamp, wanted = make_venv(venv), venv / STAMP, fingerprint(extra, gpu)
    done = stamp.read_text(encoding="utf-8").split() if stamp.is_file() else []
    # what the tests need contains what a run needs
    if wanted in done or (not extra and fingerprint("dev", gpu) in done):
        say(f"{venv} is up to date")
        return python
    pip = [str(python), "-m", "pip"]
    say("an NVIDIA GPU answers: installing CUDA torch" if gpu else "no NVIDIA GPU: installing CPU torch")
    install_torch(pip, gpu)
    call(*pip, "install", "-e", f".[{extra}]" if extra else ".")
    if not gpu:
        refuse_cuda(python)
    stamp.write_text(wanted + "\n", encoding="utf-8")
    return python


def install_sglang(venv: Path) -> Path:
    """Make or reuse an environment with SGLang, and return its Python; on a GPU as SGLang itself wants it."""
    gpu = has_gpu()
    python, stamp = make_venv(venv), venv / STAMP
    wanted = fingerprint(" ".join([SGLANG, *SGLANG_NEEDS, *SGLANG_ALONE]), gpu)
    if stamp.is_file() and wanted in stamp.read_text(encoding="utf-8").split():
        say(f"{venv} is up to date")
        return python
    pip = [str(python), "-m", "pip"]
    if gpu:
        call(*pip, "install", SGLANG)
    else:
        install_torch(pip, gpu)
        # the torch that is there stays, whatever the others would like
        constraint = venv / "constraint.txt"
        version = subprocess.run(
            [str(python), "-c", "from importlib.metadata import version; print(version('torch'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        constraint.write_text(f"torch=={version}\n", encoding="utf-8")
        call(*pip, "install", "-c", str(constraint), *SGLANG_NEEDS)
        call(*pip, "install", "--no-deps", *SGLANG_ALONE)
        refuse_cuda(python)
    stamp.write_text(wanted + "\n", encoding="utf-8")
    return python


def split_arguments(arguments: list[str], venv: Path = ROOT / ".venv") -> tuple[Path, list[str]]:
    """(environment folder, what is passed on).

    Args:
        venv: the folder where none is named.
    """
    rest = list(arguments)
    for place, word in enumerate(rest):
        if word == "--venv":
            if place + 1 == len(rest):
                fail("--venv needs a folder", "python3 bootstrap.py run --venv DIR")
            venv = Path(rest[place + 1]).absolute()
            del rest[place : place + 2]
            break
        if word.startswith("--venv="):
            venv = Path(word.partition("=")[2]).absolute()
            del rest[place]
            break
    return venv, rest


def run_tests(python: Path) -> int:
    """All tests, one half beside the other; returns an exit code. What the second half says is shown at the end."""
    half, call = [f"tests/{name}" for name in HALF], [str(python), "-m", "pytest", "-q"]
    with tempfile.TemporaryFile() as told:
        others = [*call, "tests", *(f"--ignore={path}" for path in half)]
        say(f"the tests, in two processes: {' '.join(half)}, and all others")
        beside = subprocess.Popen(others, cwd=ROOT, stdout=told, stderr=subprocess.STDOUT)
        try:
            code = subprocess.run([*call, *half], cwd=ROOT, check=False).returncode
            code = beside.wait() or code
        finally:
            beside.terminate()
            beside.wait()
            told.seek(0)
            sys.stdout.write(told.read().decode(errors="replace"))
    return code if code >= 0 else 128 - code


def main() -> None:
    """Do what the first argument says."""
    if sys.version_info < (3, 11):  # noqa: UP036 -- this file is what an older Python is given first
        fail(f"slime needs Python 3.11 or newer, this is {sys.version.split()[0]}", "call it with a newer python3")
    action = sys.argv[1] if len(sys.argv) > 1 else ""
    if action not in ("run", "test", "sglang"):
        fail(f"{action!r} is not something to do", "python3 bootstrap.py run | test | sglang")
    if action == "sglang":
        venv, _ = split_arguments(sys.argv[2:], SGLANG_VENV)
        python = install_sglang(venv)
        say(f"--set engine.backend=sglang --set engine.python={python}")
        return
    venv, rest = split_arguments(sys.argv[2:])
    if "--sglang" in rest:
        rest.remove("--sglang")
        # beside the other one, so that a throw-away environment has a throw-away SGLang
        beside = SGLANG_VENV if venv.parent == ROOT else venv.with_name(f"{venv.name}-sglang")
        os.environ["SLIME_SGLANG_PYTHON"] = str(install_sglang(beside))
    python = install(venv, "dev" if action == "test" else "")
    if action == "test" and not rest:
        sys.exit(run_tests(python))
    if action == "test":
        command = [str(python), "-m", "pytest", "-q", *rest]
    else:
        chosen = any(a.partition("=")[0] in ("--recipe", "--resume", "--model") for a in rest)
        command = [str(python.parent / "slime"), "run", *([] if chosen else ["--recipe", "quickstart"]), *rest]
    say(" ".join(command))
    if action == "test":
        os.chdir(ROOT)
    os.execv(command[0], command)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

"""`slime doctor`: is everything here that a run needs, and does it fit together?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from slimecli.commands._options import JsonOpt

if TYPE_CHECKING:
    from slimecli.plan_machine import Machine

EXAMPLES = [
    "slime doctor",
    "slime doctor --json",
]

REQUIRED: dict[str, str] = {
    "aiohttp": ">=3.10",
    "huggingface-hub": ">=1.0",
    "isal": ">=1.7",
    "numpy": ">=1.26",
    "orjson": ">=3.10",
    "pydantic": ">=2.7",
    "pyarrow": ">=15",
    "pyyaml": ">=6",
    "ray": ">=2.40",
    "reasoning-gym": "==0.1.25",
    "regex": ">=2024.11",
    "rich": ">=13",
    "safetensors": ">=0.5",
    "sympy": ">=1.12",
    "tokenizers": ">=0.21",
    "torch": ">=2.7",
    "transformers": ">=5.0",
    "typer": ">=0.29",
    "zstandard": ">=0.23",
}
"""distribution -> versions that work; equal to the dependencies in pyproject.toml (a test says so)"""

OPTIONAL = {
    "sglang": "engine.backend = 'sglang'",
    "megatron-core": "trainer.backend = 'megatron'",
    "transformer-engine": "fp8, and fused kernels of trainer.backend = 'megatron' on GPUs",
    "mbridge": "a second opinion on the weight maps of trainer.backend = 'megatron'",
    "math-verify": "reward.type = 'math_verify'",
    "tensorboard": "observe.tensorboard = true",
    "wandb": "observe.wandb_project",
}
"""distribution -> the recipe setting that needs it"""

MIN_FREE_DISK = 2 * 10**9
"""bytes; the quickstart needs well under one GB, its Ray session the rest"""
MIN_SHARED_MEMORY = 64 * 2**20
"""bytes; a container's default of 64 MB is too little for Ray's object store"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding."""

    name: str
    status: str
    """`ok`, `warn` (something will be slow or missing) or `fail` (a run cannot work)"""
    detail: str
    fix: str = ""


def diagnose() -> list[Check]:
    """Every check; none stops the others."""
    from slimecli import env
    from slimecli.plan_machine import this_machine

    machine = this_machine(env.runs_root())
    return [
        *_python(),
        *_packages(),
        *_torch(machine),
        *_conflicts(),
        *_machine(machine),
        *_ports(),
    ]


def _python() -> Iterator[Check]:
    import platform
    import sys

    good = sys.version_info >= (3, 11)
    where = f"{platform.python_version()} at {sys.executable} on {platform.platform()}"
    yield Check(name="python", status="ok" if good else "fail", detail=where, fix="" if good else "use Python 3.11+")


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _packages() -> Iterator[Check]:
    from packaging.specifiers import SpecifierSet

    for name, wanted in REQUIRED.items():
        version = _version(name)
        good = bool(version) and SpecifierSet(wanted, prereleases=True).contains(version)
        detail = version if good else f"{version or 'not installed'}; needed: {wanted}"
        fix = "" if good else f"pip install '{name}{wanted}'"
        yield Check(name=name, status="ok" if good else "fail", detail=detail, fix=fix)
    for name, use in OPTIONAL.items():
        version = _version(name)
        yield Check(name=name, status="ok", detail=version or f"not installed; only needed for {use}")


def _conflicts() -> Iterator[Check]:
    """Installed packages that do not go together by their own word, as SGLang and another torch."""
    from importlib import metadata

    from packaging.requirements import Requirement

    for name in (*REQUIRED, *OPTIONAL):
        for text in (metadata.requires(name) or []) if _version(name) else []:
            needs = Requirement(text)
            version = _version(needs.name)
            if not version or (needs.marker and not needs.marker.evaluate({"extra": ""})):
                continue
            if not needs.specifier.contains(version, prereleases=True):
                detail = f"{name} {_version(name)} needs {needs.name}{needs.specifier}, but {version} is installed"
                fix = f"pip install '{needs.name}{needs.specifier}', or another version of {name}"
                yield Check(name=f"{name} and {needs.name}", status="warn", detail=detail, fix=fix)


def _torch(machine: Machine) -> Iterator[Check]:
    """What torch itself says, asked in a process of its own: a broken build may crash."""
    import json
    import subprocess
    import sys
    from importlib import metadata

    code = (
        "import json, torch; print(json.dumps({'cuda_build': torch.version.cuda, 'cuda': torch.cuda.is_available(),"
        " 'cpu': torch.backends.cpu.get_cpu_capability()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        yield Check(name="torch import", status="fail", detail=done.stderr.strip()[-300:], fix="reinstall torch")
        return
    found = json.loads(done.stdout)
    build = f"CUDA {found['cuda_build']}" if found["cuda_build"] else "CPU"
    text = f"{build} build, {found['cpu']} kernels"
    if machine.gpus and not found["cuda"]:
        fix = "install a CUDA build of torch that fits the driver"
        yield Check(name="torch build", status="fail", detail=f"{text}; {machine.gpus} GPU(s) out of reach", fix=fix)
    else:
        yield Check(name="torch build", status="ok", detail=text)
    nvidia = [d.metadata["Name"] for d in metadata.distributions() if str(d.metadata["Name"]).startswith("nvidia-")]
    if nvidia and not machine.gpus:
        detail = f"{len(nvidia)} CUDA packages on a machine without a GPU"
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cpu, in a fresh environment"
        yield Check(name="torch size", status="warn", detail=detail, fix=fix)


def _machine(machine: Machine) -> Iterator[Check]:
    yield Check(name="processors", status="ok", detail=f"{machine.cpus} usable")
    gpu = f"{machine.gpus} with at least {machine.gpu_memory_bytes / 1e9:.0f} GB" if machine.gpus else "none (CPU only)"
    yield Check(name="GPUs", status="ok", detail=gpu)
    yield _space("memory", machine.memory_bytes, 2 * 10**9, "close other programs")
    yield _space("disk", machine.disk_free_bytes, MIN_FREE_DISK, "free space, or move the runs with SLIME_RUNS")
    yield _space(
        "/dev/shm", machine.shared_memory_bytes, MIN_SHARED_MEMORY + 1, "in a container: docker run --shm-size=2g"
    )


def _space(name: str, free: int, needed: int, fix: str) -> Check:
    good = free >= needed
    detail = f"{free / 1e9:.1f} GB free"
    return Check(name=name, status="ok" if good else "warn", detail=detail, fix="" if good else fix)


def _ports() -> Iterator[Check]:
    import socket

    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=5):
                yield Check(name="loopback", status="ok", detail="ports can be opened and reached")
    except OSError as error:
        fix = "allow connections to 127.0.0.1: engines and Ray talk over it"
        yield Check(name="loopback", status="fail", detail=str(error), fix=fix)


def cli(json_: JsonOpt = False) -> None:
    """Check Python, packages, torch, GPUs, memory, disk and ports."""
    from slimecli import console
    from slimecli.errors import SlimeError

    checks = diagnose()
    if json_:
        console.emit([asdict(c) for c in checks])
    else:
        console.table([asdict(c) for c in checks], ["status", "name", "detail", "fix"])
    failed = [c for c in checks if c.status == "fail"]
    if failed:
        raise SlimeError(
            "; ".join(f"{c.name}: {c.detail}" for c in failed), "; ".join(dict.fromkeys(c.fix for c in failed if c.fix))
        )

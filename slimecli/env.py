"""The only file that reads or writes the process environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def hf_home() -> Path:
    """Cache folder of huggingface-hub."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()


def hf_cache() -> Path:
    """Folder of downloaded repositories, shared with every program that uses huggingface-hub."""
    return Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub").expanduser()


def hf_offline() -> bool:
    """True when the user asked the hub's libraries to stay off the network."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def hf_endpoint() -> str:
    """Address of the hub or of a mirror of it."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hf_token() -> str | None:
    """The user's hub token, if one is set."""
    return os.environ.get("HF_TOKEN")


def secret(name: str) -> str:
    """A key that the user keeps in an environment variable of this name; empty if it is not set."""
    return os.environ.get(name, "")


def runs_root() -> Path:
    """Folder under which run names are looked up; `SLIME_RUNS` moves it."""
    return Path(os.environ.get("SLIME_RUNS", "runs"))


def no_color() -> bool:
    """True when the user asked for plain text (https://no-color.org)."""
    return "NO_COLOR" in os.environ


def distributed_rank() -> tuple[int, int]:
    """(rank, world size) as torchrun sets them; (0, 1) in a plain process."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process among those of its machine, as torchrun sets it; without it, the rank."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def rendezvous() -> tuple[str, int]:
    """(host, port) at which torchrun's ranks meet."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def child_env(**extra: str) -> dict[str, str]:
    """Environment for a process that slime starts: the user's own plus the pairs given."""
    return {**os.environ, **extra}


def engine_env(threads: int, **extra: str) -> dict[str, str]:
    """Environment for a rollout server in a process of its own.

    Without what torchrun sets for this process, which is none of the server's ranks, and without the allocator options
    of training, which SGLang's memory saver cannot work with.
    """
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    dropped = {*ours, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **extra}


def sglang_python() -> str:
    """Interpreter with SGLang that the tests use: `SLIME_SGLANG_PYTHON`; empty if it is not set."""
    return os.environ.get("SLIME_SGLANG_PYTHON", "")


def set_visible_gpus(numbers: Sequence[int]) -> None:
    """GPUs of this machine that this process and its children may use. Call before CUDA is touched."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(n) for n in numbers)


def quiet_libraries() -> None:
    """Silence progress bars and advice of libraries whose talk would bury ours. Call before importing them."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def quiet_ray() -> None:
    """No usage reports and no log duplication from a local Ray. Call before ray.init."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def set_threads(threads: int) -> None:
    """Thread count for OpenMP and MKL in this process; must precede the import of torch to reach every pool."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def set_cuda_connections() -> None:
    """One queue to the GPU, unless the user says otherwise: tensor parallelism overlaps sending and computing only if
    kernels run in the order of their launch. Must precede the first use of the GPU."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_rendezvous(rank: int, world_size: int, host: str, port: int, local_rank: int = 0) -> None:
    """What torch.distributed's env:// initialisation reads, and the rank among the processes of this machine."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))


def set_gloo_loopback() -> None:
    """Ranks that are all on this machine exchange nothing by way of its network, unless the user says otherwise."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

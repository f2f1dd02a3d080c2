"""The program of a server process on a machine without a GPU: SGLang's own server, where only its kernels are missing.

Run as a script by the Python that has SGLang. SGLang's HTTP server, scheduler, radix cache, sampler, weight updater and
models run as they are, the models in their own PyTorch form (`forward_native`). What stands in, why, and until when:

* `sgl_kernel`: its wheel is for CUDA, and SGLang imports it without asking. A function of it that is called says so.
  Can go when a CPU wheel of it is on PyPI.
* Triton: 900 MB that no CPU path calls. SGLang's own stand-in, made for macOS, is used; a Triton that is installed is
  left alone. Can go when SGLang imports Triton on demand.
* two operators of torchvision: that wheel is linked with CUDA, and its import asks for their schemas. Can go when a
  CPU build of torchvision is installed.
* `libibverbs`, a system library for InfiniBand: Mooncake's, which carries caches from prefill to decode servers, is
  linked with it even where it goes over TCP. An empty one stands in, where there is none. Can go when it is installed.
* `torch.cuda.synchronize`: SGLang's weight checker calls it on every device. Can go when SGLang asks for the device.

SGLang's processes are spawned, and import the main module anew, so that the stand-ins are set in each.
"""

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import platform
import struct
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock


def _missing_kernel(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{module}.{name}: there are no SGLang kernels on this machine")

    return missing


def stand_in_for_kernels() -> None:
    """A module `sgl_kernel` that can be imported, and whose functions cannot be called."""
    if importlib.util.find_spec("sgl_kernel") is not None:
        return
    module = types.ModuleType("sgl_kernel")
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    attributes: dict[str, Any] = vars(module)
    attributes["__version__"] = "0.4.10"  # SGLang refuses older ones
    attributes["__getattr__"] = lambda name: _missing_kernel("sgl_kernel", name)
    sys.modules["sgl_kernel"] = module


def stand_in_for_triton(sglang: Path) -> None:
    """SGLang's own stand-in, set up on Macs alone: for the length of that call this machine says it is one."""
    import torch

    if importlib.util.find_spec("triton") is not None:
        return
    spec = importlib.util.spec_from_file_location("_slime_sglang_platform_stubs", sglang / "_platform_stubs.py")
    assert spec is not None and spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    with (
        mock.patch.object(sys, "platform", "darwin"),
        mock.patch.object(platform, "machine", lambda: "arm64"),
        mock.patch.object(torch.backends.mps, "is_available", lambda: True),
    ):
        stubs.install_platform_stubs()


def stand_in_for_vision_operators() -> Any:
    """Schemas of the operators that torchvision registers functions for; the library must stay alive."""
    import torch

    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def empty_library(name: str) -> bytes:
    """A shared library in ELF's format that has a name and no functions."""
    strings = b"\0" + name.encode() + b"\0"
    dynamic, symbols, text = 232, 328, 352  # where they begin (bytes); before them the header and three segments
    with Path("/proc/self/exe").open("rb") as own:
        machine = own.read(20)[18:]
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<H", 3) + machine
    header += struct.pack("<IQQQIHHHHHH", 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0)
    size = text + len(strings)
    segments = [(1, 0, size, 4096), (2, dynamic, symbols - dynamic, 8), (0x6474E551, 0, 0, 16)]  # the last: the stack
    for kind, start, length, alignment in segments:
        header += struct.pack("<IIQQQQQQ", kind, 6, start, start, start, length, length, alignment)
    # name, strings, their size, symbols (the empty first one alone), their size, end
    entries = [(14, 1), (5, text), (10, len(strings)), (6, symbols), (11, 24), (0, 0)]
    return header + b"".join(struct.pack("<QQ", *entry) for entry in entries) + bytes(24) + strings


def stand_in_for_infiniband() -> None:
    """Mooncake finds it by its name; a function of it is looked for when it is called, which TCP never does."""
    if importlib.util.find_spec("mooncake") is None:
        return
    with contextlib.suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
        return
    file = os.memfd_create("libibverbs.so.1")
    os.write(file, empty_library("libibverbs.so.1"))
    ctypes.CDLL(f"/proc/self/fd/{file}")
    os.close(file)
    sys.setdlopenflags(os.RTLD_LAZY)


def stand_in_for_synchronize() -> None:
    """Nothing to wait for."""
    import torch

    torch.cuda.synchronize = lambda device=None: None


def install() -> Any:
    """All stand-ins; the caller holds what is returned."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        sys.exit(f"{sys.executable} has no SGLang")
    stand_in_for_triton(Path(package.submodule_search_locations[0]))
    stand_in_for_kernels()
    stand_in_for_infiniband()
    stand_in_for_synchronize()
    return stand_in_for_vision_operators()


if __name__ in ("__main__", "__mp_main__"):
    _HELD = install()
if __name__ == "__main__":
    # loaded by path, and not run as the main module: SGLang's processes import that one, which must be this file
    _SPEC = importlib.util.spec_from_file_location("slime_serve", Path(__file__).with_name("serve.py"))
    assert _SPEC is not None and _SPEC.loader is not None
    _SERVE = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(_SERVE)
    _SERVE.main()

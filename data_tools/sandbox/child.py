"""Inside of the sandbox: this file is run as a program, `python -I child.py CONTROL_FD REPORT_FD`, the job on stdin.

Three processes, so that nothing of the job outlives it: the launcher gives up its rights and enters new namespaces; the
keeper is the first process of the new process namespace, keeps the deadline, and takes every other process with it when
it ends; the worker lowers its limits and runs the code. Standard library only, and nothing of slime.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

NOBODY = 65534
"""user and group that root becomes: root is not held by a limit on processes"""
_NAMESPACES = {"mounts": 0x00020000, "ipc": 0x08000000, "users": 0x10000000, "processes": 0x20000000, "net": 0x40000000}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_MS_NOSUID_NODEV, _MS_REC_PRIVATE = 0x2 | 0x4, 0x4000 | 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_CAP_VERSION = 0x20080522
_PLAIN = (int, float, complex, bool, str, bytes, type(None), list, tuple, dict, set, frozenset)

_libc = ctypes.CDLL(None, use_errno=True)


def launch(job: dict[str, Any], control: int, report: int) -> None:
    """Enter the sandbox, start the keeper, and wait for it."""
    stdin = os.memfd_create("stdin")
    with os.fdopen(os.dup(stdin), "wb") as stream:
        stream.write(job["stdin"].encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    libraries = _open_libraries()
    other_user = _drop_root(job)
    entered = _enter_namespaces()
    job["kept"] = libraries
    keeper = os.fork()
    if keeper == 0:
        _keep(job, (control, report, stdin), entered, other_user)
    os.close(control)
    os.close(report)
    os.waitpid(keeper, 0)


def _open_libraries() -> list[int]:
    """Hold Python's library folders open: they may lie in a home that the user we become cannot walk through."""
    held = []
    for number, folder in enumerate(sys.path):
        if os.geteuid() == 0 and Path(folder).is_dir():
            held.append(os.open(folder, os.O_PATH | os.O_DIRECTORY))
            sys.path[number] = f"/proc/self/fd/{held[-1]}"
            _move_packages(folder, sys.path[number])
    sys.path_importer_cache.clear()
    return held


def _move_packages(old: str, new: str) -> None:
    """Packages that are loaded already, `encodings` above all, look for their parts in the new place."""
    for module in list(sys.modules.values()):
        paths = getattr(module, "__path__", None)
        if isinstance(module, types.ModuleType) and isinstance(paths, list):
            module.__path__ = [new + p[len(old) :] if p.startswith(f"{old}/") else p for p in paths]


def _drop_root(job: dict[str, Any]) -> bool:
    """Become nobody where we are root; True when that makes us another user than slime's."""
    if os.geteuid() != 0:
        return False
    os.chown(job["folder"], NOBODY, NOBODY)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self/uid_map stays root's
    return True


def _enter_namespaces() -> bool:
    """New namespaces: True for all of them, False for none, where the kernel or a container forbids them."""
    user, group = os.geteuid(), os.getegid()
    flags = sum(_NAMESPACES.values())
    entered = bool(_libc.unshare(flags) == 0)
    if entered:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            _write(f"/proc/self/{name}", text)
    return entered


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _mount(job: dict[str, Any], other_user: bool) -> bool:
    """Everything read-only except a small file system of its own at the job's folder, and /proc without the others."""
    read_only = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = f"size={job['file_mb']}m,mode=0700".encode()
    steps: tuple[Callable[[], int], ...] = (
        lambda: _libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None),
        lambda: _hide_processes(other_user),
        lambda: _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, 32),
        lambda: _libc.mount(b"tmpfs", job["folder"].encode(), b"tmpfs", ctypes.c_ulong(_MS_NOSUID_NODEV), size),
    )
    done = all(step() == 0 for step in steps)
    # what semaphores are made of; code that needs none does without
    _libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(_MS_NOSUID_NODEV), b"size=8m")
    return done


def _hide_processes(other_user: bool) -> int:
    """0 when the environment of slime's processes cannot be read under /proc: no such entries, or another user's."""
    flags = ctypes.c_ulong(_MS_NOSUID_NODEV)
    if _libc.mount(b"proc", b"/proc", b"proc", flags, None) == 0 or other_user:
        return 0
    return int(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags, b"size=4k"))


def _keep(job: dict[str, Any], descriptors: tuple[int, int, int], entered: bool, other_user: bool) -> None:
    """Body of the keeper: never returns."""
    control, report, stdin = descriptors
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    files = entered and _mount(job, other_user)
    isolation = {"network": entered, "processes": files or other_user, "files": files}
    tasks = 2 if entered else _tasks_of(os.geteuid())
    _tell(control, {"started": True, "isolation": isolation})
    worker = os.fork()
    if worker == 0:
        os.close(control)
        _work(job, report, stdin, tasks + job["processes"])
    os.close(report)
    late: list[bool] = []

    def stop(*_: object) -> None:
        late.append(True)
        _signal(worker)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, job["wall_s"])
    status, usage = _wait(worker)
    seconds = usage.ru_utime + usage.ru_stime
    _tell(control, {"exit": os.waitstatus_to_exitcode(status), "late": bool(late), "cpu_s": seconds})
    if not entered:
        _sweep()
    os._exit(0)


def _wait(worker: int) -> tuple[int, resource.struct_rusage]:
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == worker:
            return status, usage


def _signal(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _sweep() -> None:
    """End every process that the worker left behind; they became our children when it ended."""
    until = time.monotonic() + 2
    while time.monotonic() < until:
        children = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
        if not children:
            return
        for pid in children:
            _signal(pid)
            os.waitpid(pid, 0)


def _tell(control: int, message: dict[str, Any]) -> None:
    os.write(control, json.dumps(message).encode() + b"\n")


def _tasks_of(user: int) -> int:
    """Threads of a user on this machine: without a namespace, the limit on processes counts them all."""
    total = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                total += len(list((process / "task").iterdir())) if process.stat().st_uid == user else 0
    return total


def _work(job: dict[str, Any], report: int, stdin: int, tasks: int) -> None:
    """Body of the worker: never returns."""
    code = 1
    try:
        os.dup2(stdin, 0)
        os.chdir(job["folder"])
        for descriptor in range(3, 256):
            if descriptor not in (report, *job["kept"]):
                with suppress(OSError):
                    os.close(descriptor)
        _limit(job, tasks)
        code = _ended(lambda: _run(job, report))
        if job["checks"] is None:
            code = _ended(_finish) or code
    finally:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(BaseException):
                stream.flush()  # type: ignore[union-attr]
        os._exit(code & 0xFF)


def _ended(part: Callable[[], None]) -> int:
    """The exit code of a part of the program, as Python gives it."""
    try:
        part()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
        return 1
    return 0


def _finish() -> None:
    """What Python does when a program ends: wait for its threads, call what it registered."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def _limit(job: dict[str, Any], tasks: int) -> None:
    megabyte = 1 << 20
    cpu = max(1, round(job["cpu_s"] + 0.5))
    for what, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, job["memory_mb"] * megabyte, job["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, job["file_mb"] * megabyte, job["file_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, job["open_files"], job["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, tasks, tasks),
    ):
        _, most = resource.getrlimit(what)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(what, (soft, hard))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # a new user namespace gives every capability inside it, and with them the mounts could be made writable again
    _libc.capset((ctypes.c_uint32 * 2)(_CAP_VERSION, 0), (ctypes.c_uint32 * 6)())


def _run(job: dict[str, Any], report: int) -> None:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    space = module.__dict__
    if job["checks"] is None:
        os.close(report)
        exec(compile(job["code"], "solution.py", "exec"), space)
        return
    # compiled first, and with built-ins of their own: the answer may put others in their place
    checks = [_compiled(check) for check in job["checks"]]
    secret = job.pop("secret")
    sys.modules["builtins"] = copied = types.ModuleType("builtins")
    copied.__dict__.update(vars(builtins))
    space.update({"__name__": "solution", "__builtins__": copied})
    exec(compile(job["code"], "solution.py", "exec"), space)
    results: list[Any] = []
    for check in checks:
        results.append(_check(check, space))
        if not results[-1][0] and not job["all_checks"]:
            break
    os.write(report, json.dumps({"secret": secret, "results": results}).encode())


def _compiled(check: dict[str, str]) -> Any:
    """A code object; why there is none instead; for a call the code object in a list."""
    try:
        if check["kind"] == "call":
            return [compile(check["code"], "test", "eval")]
        tree = _Equality().visit(ast.parse(check["code"]))
        return compile(ast.fix_missing_locations(tree), "test", "exec")
    except (SyntaxError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _check(check: Any, space: dict[str, Any]) -> list[Any]:
    """[passed, value or why not]. A call is judged outside, by its value."""
    if isinstance(check, str):
        return [False, check]
    try:
        if isinstance(check, list):
            return [True, _plain(eval(check[0], space))]
        exec(check, {**space, "__same__": _same, "__builtins__": vars(builtins)})
    except BaseException as error:  # whatever the answer's code raises, sys.exit included, is a test that failed
        return [False, f"{type(error).__name__}: {error}"[:200]]
    return [True, ""]


class _Equality(ast.NodeTransformer):
    """`a == b` in a test becomes `__same__(a, b)`."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
            return node
        name = ast.Name("__same__", ast.Load())
        return ast.copy_location(ast.Call(name, [node.left, node.comparators[0]], []), node)


def _same(a: Any, b: Any) -> Any:
    """a == b, except that an object whose class the answer defines does not decide that it equals plain data."""
    for one, other in ((a, b), (b, a)):
        if type(one).__module__ in ("solution", "__main__") and isinstance(other, _PLAIN):
            return False
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _plain(value: Any) -> Any:
    """The value as JSON: tuples become lists, other objects their repr."""
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return repr(value)


if __name__ == "__main__":
    _job = json.loads(sys.stdin.buffer.read())
    launch(_job, int(sys.argv[1]), int(sys.argv[2]))

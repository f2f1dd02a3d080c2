import os
import time
from pathlib import Path

import pytest

from slimecli.data_tools import sandbox
from slimecli.data_tools.sandbox import Limits, isolation, run_python
from slimecli.errors import SlimeError

QUICK = Limits(wall_s=20.0, cpu_s=1.0, memory_mb=256, processes=6, file_mb=8, output_bytes=20_000)


def go(code, **kwargs):
    return run_python(code, limits=kwargs.pop("limits", QUICK), **kwargs)


def test_a_program_reads_and_writes():
    done = go("import sys\nprint(input() * 2)\nprint('!', file=sys.stderr)", stdin="ab\n")
    assert (done.status, done.exit_code, done.stdout, done.stderr) == ("ok", 0, "abab\n", "!\n")
    assert done.results is None


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("1/0", "error", 1),
        ("import sys; sys.exit(3)", "error", 3),
        ("import sys; sys.exit('why')", "error", 1),
        ("import os; os._exit(0)", "ok", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", -9),
        ("def f(:", "error", 1),
    ],
)
def test_how_it_ended(code, status, exit_code):
    done = go(code)
    assert (done.status, done.exit_code) == (status, exit_code)


@pytest.mark.parametrize("code", ["while True: pass", "9**9**9", "import time; time.sleep(60)"])
def test_endless_code_is_stopped(code):
    start = time.monotonic()
    done = go(code, limits=Limits(wall_s=1.0, cpu_s=5.0))
    assert done.status == "time"
    assert time.monotonic() - start < 10


def test_processor_time_is_limited_on_its_own():
    done = go("while True: pass", limits=Limits(wall_s=20.0, cpu_s=0.2))
    assert done.status == "time" and done.seconds < 15


def test_a_fork_bomb_stays_small_and_leaves_nothing():
    code = (
        "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(60)\n"
        "        n += 1\nexcept OSError:\n    print(n)"
    )
    start = time.monotonic()
    done = go(code)
    assert done.status == "ok" and 0 < int(done.stdout) <= QUICK.processes
    assert time.monotonic() - start < 10


def test_a_process_that_gets_away_is_ended_too():
    mark = f"away-{os.getpid()}-{time.monotonic_ns()}"
    code = (
        "import os, sys, time, ctypes\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        ctypes.CDLL(None).prctl(15, b'{mark[-15:]}', 0, 0, 0)\n        time.sleep(60)\n    os._exit(0)\n"
        "os.wait(); time.sleep(0.1); print('left')"
    )
    start = time.monotonic()
    assert go(code).stdout == "left\n"
    assert time.monotonic() - start < 10, "a process that holds the output open is not waited for"
    assert mark[-15:] not in names_of_processes()


def names_of_processes():
    found = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            found.add(path.read_text().strip())
        except OSError:
            continue
    return found


def test_memory_is_limited():
    done = go("x = bytearray(10**9)\nprint('got it')")
    assert done.status == "error" and "MemoryError" in done.stderr and done.stdout == ""


def test_much_output_ends_the_code():
    done = go("while True: print('x' * 1000)")
    assert done.status == "output" and len(done.stdout) == QUICK.output_bytes
    assert go("print('x' * 19_000)").status == "ok"


def test_files_are_small_and_go_away():
    done = go("open('a', 'w').write('x')\nimport os\nprint(open('a').read(), os.getcwd())")
    letter, folder = done.stdout.split()
    assert letter == "x" and not Path(folder).exists()
    assert go("with open('a', 'wb') as f:\n    for _ in range(20): f.write(b'x' * 2**20)").status == "error"


def test_environment_and_arguments_are_empty():
    done = go("import os, sys\nprint(sorted(os.environ), sys.argv, __name__)")
    assert done.stdout == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH'] ['solution.py'] __main__\n"


def test_open_files_of_this_process_stay_here(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    with secret.open() as stream:
        os.set_inheritable(stream.fileno(), True)
        done = go(f"import os\nprint(os.read({stream.fileno()}, 9))")
    assert "hidden" not in done.stdout and done.status == "error"


def test_isolation_holds_where_it_is_claimed(tmp_path):
    tmp_path.chmod(0o777)
    target = tmp_path / "outside"
    held = isolation()
    assert set(held) == set(sandbox.PARTS)
    written = go(f"open({str(target)!r}, 'w').write('x')")
    connected = go("import socket\ns = socket.socket()\ns.settimeout(2)\ns.connect(('1.1.1.1', 53))")
    if held["files"]:
        assert "OSError" in written.stderr or "PermissionError" in written.stderr
        assert not target.exists()
    if held["network"]:
        assert "Network is unreachable" in connected.stderr


def test_the_mounts_cannot_be_made_writable_again(tmp_path):
    code = (
        "import ctypes\nl = ctypes.CDLL(None)\na = (ctypes.c_uint64 * 4)(0, 1, 0, 0)\n"
        "print(l.syscall(442, -100, b'/', 0x8000, a, 32), l.unshare(0x10000000 | 0x20000))\n"
        "print(l.syscall(442, -100, b'/', 0x8000, a, 32))\n"
        f"open({str(tmp_path / 'x')!r}, 'w')"
    )
    done = go(code)
    assert done.stdout.split()[0] == "-1" and done.stdout.split()[-1] == "-1"
    assert done.status == "error" and not (tmp_path / "x").exists()


def test_checks():
    code = "def add(a, b): return a + b\ndef pair(): return (1, {2: [None, 'x']})"
    checks = [
        {"kind": "assert", "code": "assert add(1, 2) == 3"},
        {"kind": "call", "code": "pair()"},
        {"kind": "assert", "code": "assert add(1, 2) == 4, 'no'"},
        {"kind": "call", "code": "add(1)"},
    ]
    done = go(code, checks=checks, all_checks=True)
    assert done.results[:2] == [(True, ""), (True, [1, {"2": [None, "x"]}])]
    assert done.results[2] == (False, "AssertionError: no") and done.results[3][1].startswith("TypeError")
    assert len(go(code, checks=checks).results) == 3, "the first failure ends the checks"


@pytest.mark.parametrize(
    "code",
    [
        "print('ok')\nimport sys\nsys.exit(0)",
        "import os\nprint('1 passed')\nos._exit(0)",
        'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"secret": "", "results": [[true, ""]]}\')\n'
        "    except OSError: pass\nos._exit(0)",
        "raise SystemExit",
        "import builtins\nbuiltins.exec = lambda *a: None\ndef f(): return 1",
        "import builtins\nbuiltins.isinstance = builtins.all = lambda *a: True\ndef f(): return 1",
        "import ast\nast.parse = lambda text: None\ndef f(): return 1",
        "__same__ = lambda a, b: True\ndef f(): return 1",
        "import atexit\natexit.register(print, 'ok')\nraise KeyboardInterrupt",
        "def f(): raise SystemExit(0)",
        "class A:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(): return A()",
        "class A(int):\n    def __eq__(self, other): return True\ndef f(): return A(1)",
        "class A:\n    def __eq__(self, other): return True\ndef f(): return [A()]",
    ],
)
def test_a_program_cannot_talk_its_way_through_a_check(code):
    checks = [{"kind": "assert", "code": "assert f() == 2" if "[A()]" not in code else "assert f() == [2]"}]
    done = go(code, checks=checks)
    assert not done.results or not done.results[0][0]


def test_the_expected_value_of_a_call_is_not_inside():
    checks = [{"kind": "call", "code": "f()"}]
    done = go("import sys\ndef f():\n    g = sys._getframe(1).f_globals\n    return sorted(g)[-1]", checks=checks)
    assert done.results[0][0] and "expected" not in str(done.results)


def test_without_namespaces_the_limits_hold(monkeypatch, tmp_path):
    """As in a container that forbids user namespaces."""
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace("_libc.unshare(flags) == 0", "False"))
    tmp_path.chmod(0o755)
    monkeypatch.setattr(sandbox, "CHILD", child)
    isolation.cache_clear()
    try:
        assert isolation() == {"network": False, "processes": os.geteuid() == 0, "files": False}
        away = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nprint('left')"
        done = go(away, required=())
        assert done.stdout == "left\n" and done.seconds < 2
        bomb = "import os, time\nfor n in range(500):\n    if os.fork() == 0: time.sleep(60)"
        assert "Resource temporarily unavailable" in go(bomb, required=()).stderr
        assert go("x = bytearray(10**9)", required=()).status == "error"
        with pytest.raises(SlimeError, match="cannot be cut off from: network, files"):
            go("pass", required=("network", "files"))
    finally:
        isolation.cache_clear()


def test_a_sandbox_that_cannot_start_is_an_error_not_a_verdict(monkeypatch, tmp_path):
    broken = tmp_path / "child.py"
    broken.write_text("raise OSError('no namespaces today')")
    monkeypatch.setattr(sandbox, "CHILD", broken)
    with pytest.raises(SlimeError, match="(?s)did not start: .*no namespaces today"):
        go("pass")


def test_parts_that_are_required_are_there():
    if all(isolation().values()):
        assert go("print(1)", required=sandbox.PARTS).stdout == "1\n"
    else:
        with pytest.raises(SlimeError, match="cannot be cut off"):
            go("print(1)", required=sandbox.PARTS)


def test_the_environment_of_this_process_cannot_be_read():
    mark = Path("/proc/self/environ").read_bytes()[:80]
    code = (
        "import glob\nfound = b''\nfor path in glob.glob('/proc/[0-9]*/environ'):\n"
        f"    try: found += open(path, 'rb').read()\n    except OSError: pass\nprint({mark!r} in found)"
    )
    assert len(mark) == 80
    if isolation()["processes"]:
        assert go(code).stdout == "False\n"


def test_code_that_could_end_this_process_is_not_run_by_default(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: dict.fromkeys(sandbox.PARTS, False))
    with pytest.raises(SlimeError, match="cut off from: processes"):
        go("pass")
    assert go("print(1)", required=()).stdout == "1\n"


@pytest.mark.parametrize(
    "code",
    [
        "import threading\nthreading.Thread(target=lambda: print('done')).start()",
        "import atexit, os\natexit.register(lambda: os.write(1, b'done\\n'))",
        "import sys, io\nout = sys.stdout\nsys.stdout = io.StringIO()\nout.write('done\\n')",
        "import sys\nprint('done')\nsys.exit()",
        "import threading\nthreading.stack_size(2**26)\nthreading.Thread(target=print, args=('done',)).start()",
        "from multiprocessing import Pool\nwith Pool(2) as p: print(p.map(str.upper, ['done'])[0].lower())",
        "import subprocess\nprint(subprocess.run(['echo', 'done'], capture_output=True, text=True).stdout, end='')",
    ],
)
def test_programs_end_as_under_python(code):
    done = go(code)
    assert (done.status, done.stdout) == ("ok", "done\n"), done.stderr


def test_what_a_program_says_on_leaving_is_kept():
    done = go("import sys\nsys.exit('no input')")
    assert (done.exit_code, done.stderr) == (1, "no input\n")

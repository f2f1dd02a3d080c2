import subprocess
import sys
from pathlib import Path

import pytest

import bootstrap


@pytest.fixture
def calls(monkeypatch):
    """Commands that would be run; those that contain `refused` fail."""
    made = []

    def attempt(*command):
        made.append(command)
        return "refused" not in made[0]

    monkeypatch.setattr(bootstrap, "call", lambda *command: made.append(command))
    monkeypatch.setattr(bootstrap, "attempt", attempt)
    return made


def test_arguments_are_passed_on_without_the_environment():
    assert bootstrap.split_arguments(["--venv", "/x", "-k", "a"]) == (Path("/x"), ["-k", "a"])
    assert bootstrap.split_arguments(["-q", "--venv=/x"]) == (Path("/x"), ["-q"])
    assert bootstrap.split_arguments(["--set", "steps=2"]) == (bootstrap.ROOT / ".venv", ["--set", "steps=2"])
    with pytest.raises(SystemExit, match="needs a folder"):
        bootstrap.split_arguments(["--venv"])


def test_without_a_gpu_only_cpu_builds_are_asked_for(calls, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    bootstrap.install_torch(["pip"], gpu=False)
    assert calls == [("pip", "install", f"{bootstrap.TORCH}+cpu")]
    calls.clear()
    bootstrap.install_torch(["refused"], gpu=False)
    assert calls[1] == ("refused", "install", bootstrap.TORCH, "--index-url", bootstrap.CPU_INDEX)


def test_with_a_gpu_or_on_a_mac_the_default_build_is_taken(calls, monkeypatch):
    bootstrap.install_torch(["pip"], gpu=True)
    monkeypatch.setattr(bootstrap.sys, "platform", "darwin")
    bootstrap.install_torch(["pip"], gpu=False)
    assert calls == [("pip", "install", bootstrap.TORCH)] * 2


def test_a_second_call_installs_nothing(calls, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: False)
    monkeypatch.setattr(bootstrap, "refuse_cuda", lambda python: None)
    bootstrap.install(tmp_path, "dev")
    assert calls[-1][-3:] == ("install", "-e", ".[dev]")
    calls.clear()
    bootstrap.install(tmp_path, "dev")
    bootstrap.install(tmp_path, "")  # what the tests need contains what a run needs
    assert calls == []
    monkeypatch.setattr(bootstrap, "TORCH", "torch==0")
    monkeypatch.setattr(bootstrap, "fingerprint", lambda extra, gpu: "other")
    bootstrap.install(tmp_path, "dev")
    assert calls != []


def test_cuda_packages_on_a_machine_without_a_gpu_fail_loudly(monkeypatch):
    def listing(found):
        return lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=found, stderr="")

    monkeypatch.setattr(bootstrap.subprocess, "run", listing("\n"))
    bootstrap.refuse_cuda(Path("/x/bin/python"))
    monkeypatch.setattr(bootstrap.subprocess, "run", listing("nvidia-cublas-cu12 nvidia-nccl-cu12\n"))
    with pytest.raises(SystemExit, match="nvidia-cublas-cu12, nvidia-nccl-cu12"):
        bootstrap.refuse_cuda(Path("/x/bin/python"))


def test_sglang_without_a_gpu_keeps_the_torch_that_is_there(calls, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: False)
    monkeypatch.setattr(bootstrap, "refuse_cuda", lambda python: None)
    said = subprocess.CompletedProcess((), 0, stdout="2.13.0+cpu\n", stderr="")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *a, **k: said)
    bootstrap.install_sglang(tmp_path)
    assert (tmp_path / "constraint.txt").read_text() == "torch==2.13.0+cpu\n"
    plain, alone = calls[-2:]
    assert plain[3:6] == ("install", "-c", str(tmp_path / "constraint.txt")) and "transformers==5.19.0" in plain
    assert alone[3:5] == ("install", "--no-deps") and alone[-1] == bootstrap.SGLANG
    calls.clear()
    bootstrap.install_sglang(tmp_path)
    assert calls == [], "a second call installs nothing"


def test_the_tests_are_told_where_sglang_is(monkeypatch, tmp_path):
    """Beside a throw-away environment, else in .venv-sglang."""
    made, ran = [], []
    monkeypatch.setattr(bootstrap, "install", lambda venv, extra: venv / "bin" / "python")
    monkeypatch.setattr(bootstrap, "install_sglang", lambda venv: made.append(venv) or venv / "bin" / "python")
    monkeypatch.setattr(bootstrap.os, "execv", lambda path, command: ran.append(command))
    monkeypatch.setenv("SLIME_SGLANG_PYTHON", "")
    monkeypatch.chdir(tmp_path)
    for words in (["--venv", str(tmp_path / "v")], []):
        monkeypatch.setattr(bootstrap.sys, "argv", ["bootstrap.py", "test", "--sglang", "-k", "x", *words])
        bootstrap.main()
        assert bootstrap.os.environ["SLIME_SGLANG_PYTHON"] == str(made[-1] / "bin" / "python")
        assert ran[-1][1:] == ["-m", "pytest", "-q", "-k", "x"]
    assert made == [tmp_path / "v-sglang", bootstrap.SGLANG_VENV]


def test_the_quickstart_is_run_where_nothing_else_is_named(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(bootstrap, "install", lambda venv, extra: venv / "bin" / "python")
    monkeypatch.setattr(bootstrap.os, "execv", lambda path, command: ran.append(command[1:]))
    for words in ([], ["--run", "r"], ["--recipe=grpo"], ["--model", "m"], ["--model=m"], ["--resume"]):
        monkeypatch.setattr(bootstrap.sys, "argv", ["bootstrap.py", "run", *words])
        bootstrap.main()
        quickstart = ["--recipe", "quickstart"] if words in ([], ["--run", "r"]) else []
        assert ran[-1] == ["run", *quickstart, *words]


@pytest.mark.parametrize(("first", "second", "code"), [(0, 0, 0), (1, 0, 1), (0, 3, 3), (-9, 0, 137)])
def test_all_tests_are_run_one_half_beside_the_other(monkeypatch, capfd, first, second, code):
    ran = []

    class Beside:
        def __init__(self, command, stdout, **how):
            ran.append(command)
            stdout.write(b"the others\n")

        def wait(self):
            return second

        def terminate(self):
            pass

    def run(command, **how):
        ran.append(command)
        return subprocess.CompletedProcess(command, first)

    monkeypatch.setattr(bootstrap.subprocess, "Popen", Beside)
    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    assert bootstrap.run_tests(Path("python")) == code
    others, half = ran
    assert others[4] == "tests" and [f"--ignore={path}" for path in half[4:]] == others[5:], "each test in one half"
    assert all((bootstrap.ROOT / path).exists() for path in half[4:])
    assert capfd.readouterr().out == "the others\n"


def test_a_pip_that_fails_is_called_again_and_in_the_end_blamed(monkeypatch, capsys):
    codes, paused = [1, 1, 0], []
    monkeypatch.setattr(bootstrap.time, "sleep", paused.append)
    monkeypatch.setattr(
        bootstrap.subprocess, "run", lambda command, **k: subprocess.CompletedProcess(command, codes.pop(0))
    )
    bootstrap.call("pip", "install", "x")
    assert codes == [] and paused == list(bootstrap.PAUSES)
    assert capsys.readouterr().err.count("bootstrap: pip install x\n") == 3
    codes += [1] * 3
    with pytest.raises(SystemExit, match="no test has failed: pip has, 3 times: `pip install x`"):
        bootstrap.call("pip", "install", "x")
    assert codes == []


def test_every_package_of_sglang_is_of_one_version():
    """A release of one of them shall not decide whether the tests pass."""
    assert all("==" in name for name in (*bootstrap.SGLANG_NEEDS, *bootstrap.SGLANG_ALONE))


def test_an_unknown_action_and_an_old_python_are_clear_messages(monkeypatch):
    done = subprocess.run([sys.executable, bootstrap.__file__, "deploy"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: 'deploy' is not something to do\n  fix: ")
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11"):
        bootstrap.main()


def test_ci_calls_the_second_command():
    script = (bootstrap.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "set -euo pipefail" in script
    called = [line for line in script.splitlines() if line.startswith("python3 ")]
    assert called == [
        'python3 bootstrap.py test --venv "$scratch/venv" "$@"',
        'python3 bootstrap.py test --venv "$scratch/venv" --sglang -m sglang "$@"',
    ]
    assert (bootstrap.ROOT / ".ci" / "run").stat().st_mode & 0o111

"""The command line: name -> function, and the one place where errors are printed. Nothing else."""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import typer

from slimecli import __version__, console, env
from slimecli.errors import ExitCode, SlimeError
from slimecli.flags import expanded

COMMANDS: dict[str, str] = {
    "run": "slimecli.commands.run",
    "plan": "slimecli.commands.plan",
    "init": "slimecli.commands.init",
    "download": "slimecli.commands.download",
    "convert": "slimecli.commands.convert",
    "prepare-data": "slimecli.commands.prepare_data",
    "serve": "slimecli.commands.serve",
    "rollout": "slimecli.commands.rollout",
    "train": "slimecli.commands.train",
    "eval": "slimecli.commands.eval",
    "export": "slimecli.commands.export",
    "watch": "slimecli.commands.watch",
    "report": "slimecli.commands.report",
    "runs": "slimecli.commands.runs",
    "recipes": "slimecli.commands.recipes",
    "models": "slimecli.commands.models",
    "reward": "slimecli.commands.reward",
    "doctor": "slimecli.commands.doctor",
    "completions": "slimecli.commands.completions",
}
"""command -> module; the module's `cli` is the Typer shell, `EXAMPLES` its examples"""

WRITERS = ("run", "prepare-data", "rollout", "train")
"""commands that own the run they name, with its lock; all others only look at it"""

PANELS: dict[str, tuple[str, ...]] = {
    "The whole way": ("run", "plan", "init"),
    "One stage alone": ("download", "convert", "prepare-data", "serve", "rollout", "train", "eval", "export"),
    "Look at runs": ("watch", "report", "runs"),
    "Look things up": ("recipes", "models", "reward", "doctor", "completions"),
}
"""groups of the help screen"""


MACHINE_TROUBLE: dict[int, str] = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there; it is your quota that is used up",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose a file or folder that is yours, or have its permissions changed",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the whole machine has too many files open",
    errno.EIO: "look at the disk; the kernel log (dmesg) tells more",
}
"""errno -> what to do: what the machine refuses is no bug of ours, wherever it comes up"""


def build_app(names: Sequence[str] | None = None) -> typer.Typer:
    """The Typer app with these commands, or all of them; only their modules are imported."""
    from slimecli.commands._options import epilog

    panel_of = {name: panel for panel, members in PANELS.items() for name in members}
    app = typer.Typer(
        name="slime",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for name in COMMANDS if names is None else names:
        module = importlib.import_module(COMMANDS[name])
        kind = getattr(module, "COMMAND", None)  # of commands with flags for recipe fields
        app.command(name, cls=kind, epilog=epilog(module.EXAMPLES), rich_help_panel=panel_of[name])(module.cli)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        console.emit_line(f"slime {__version__}")
        raise typer.Exit


def _global_options(
    debug: bool = typer.Option(False, "--debug", help="show the traceback of an error; may stand anywhere"),
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_show_version, help="print the version"),
) -> None:
    """RL post-training of language models: every stage a command, `slime run` the whole loop."""


def main() -> None:
    """Entry point of the `slime` command."""
    if env.distributed_rank()[0] == 0:  # the others answer to this one, and die at once when torchrun ends them
        signal.signal(signal.SIGTERM, _on_sigterm)
    # a shell that closed them (`>&-`) wants nothing said there; Python then has None in their place
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - lives as long as we do
    sys.exit(run(sys.argv[1:]))


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code. The error boundary: nothing is printed as an error elsewhere."""
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"]
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        return _explain(error, argv)
    return code


def _dispatch(argv: list[str]) -> int:
    """Call the command. Without one, show the help; that is nothing done, so not OK."""
    argv = expanded(argv)
    app = build_app(argv[:1]) if argv and argv[0] in COMMANDS else build_app()
    try:
        result = app(argv or ["--help"], prog_name="slime", standalone_mode=False)
    except SystemExit as stop:
        # Typer turns a broken pipe into an exit of its own; the reader's going away is not the work's failure
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    if result == ExitCode.INTERRUPTED:  # what Typer makes of a KeyboardInterrupt
        raise KeyboardInterrupt
    code = int(result) if isinstance(result, int) else ExitCode.OK
    return code if argv else ExitCode.USAGE


def _unread() -> list[int]:
    """Which of standard output and error are pipes that nobody reads any more: other pipes may break, too."""
    watch = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            watch.register(stream.fileno(), 0)
    return [stream for stream, event in watch.poll(0) if event & (select.POLLERR | select.POLLHUP)]


def _explain(error: BaseException, argv: list[str]) -> int:
    """Say what went wrong and return the exit code."""
    if isinstance(error, SlimeError):
        console.fail(str(error))
        return error.exit_code
    if isinstance(error, typer.TyperException):
        command = argv[0] if argv and argv[0] in COMMANDS else ""
        field = _field_behind(error)
        known = f"--set {field}=VALUE, or " if field else ""
        console.fail(f"{_message(error)}\n  fix: {known}see `slime {command}{' ' if command else ''}--help`")
        return ExitCode.USAGE
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        console.fail("interrupted")
        return ExitCode.INTERRUPTED
    if isinstance(error, BrokenPipeError) and (unread := _unread()):
        for stream in unread:  # the interpreter flushes it once more at its end, into the closed pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        return ExitCode.OK
    if isinstance(error, OSError) and error.errno in MACHINE_TROUBLE:
        console.fail(f"{error.strerror}: {error.filename or 'standard output'}\n  fix: {MACHINE_TROUBLE[error.errno]}")
        if error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    try:
        where = _keep_traceback(error, argv)
    except (SlimeError, OSError):  # a full disk, say: the terminal is the last place left for it
        traceback.print_exception(error)
        where = "above"
    console.fail(
        f"{type(error).__name__}: {error}\n  this is a bug in slime; the traceback: {where}\n"
        f"  fix: report it with that file; --debug shows it here"
    )
    return ExitCode.FAILED


def _field_behind(error: Any) -> str:
    """The recipe's field that an unknown option is a flag of THUDM/slime for; empty if it is none."""
    from slimecli.rollout.args import FLAGS

    field = FLAGS.get(str(getattr(error, "option_name", "")).removeprefix("--").replace("-", "_"), "")
    return "engine.max_context" if field == "max_context" else field


def _message(error: Any) -> str:
    """Typer's sentence about a wrong command line, with the nearest option name where it knows some."""
    from slimecli.errors import nearest

    known = getattr(error, "possibilities", None)
    if known:
        return f"no option {error.option_name}{nearest(error.option_name, list(known))}"
    text = str(error.format_message()).rstrip(".")
    return text[:1].lower() + text[1:]


def _keep_traceback(error: BaseException, argv: list[str]) -> str:
    """Store the traceback of a bug: in the error.json of the run that the command works on, else in a new file.

    A command that only looks at a run has no say in whether it failed; nor has one that finds another at work there.
    """
    import contextlib
    import tempfile
    from pathlib import Path

    from slimecli import files, rundir

    text = "".join(traceback.format_exception(error))
    flags = {"--run", "-r"}
    names = [b for a, b in itertools.pairwise(argv) if a in flags]
    names += [a.partition("=")[2] for a in argv if a.startswith("--run=")]
    root = rundir.run_path(names[-1]) if names and argv[0] in WRITERS else None
    if root is not None and (root / "run.json").is_file():
        run = rundir.RunDir(root)
        with contextlib.suppress(SlimeError), run.lock():
            what = f"{type(error).__name__}: {error}"
            files.write_json(run.error_path, {"what": what, "argv": argv, "traceback": text})
            return str(run.error_path)
    with tempfile.NamedTemporaryFile("w", prefix="slime-error-", suffix=".txt", delete=False) as handle:
        handle.write(f"slime {__version__} {argv}\n\n{text}")
    return str(Path(handle.name))

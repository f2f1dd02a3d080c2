"""The command line: name -> function, and the one place where errors are printed. Nothing else."""

from __future__ import annotations

import importlib
import sys

import typer

from slimecli import console
from slimecli.errors import ExitCode, SlimeError

COMMANDS: dict[str, str] = {
    "run": "slimecli.commands.run",
    "plan": "slimecli.commands.plan",
    "download": "slimecli.commands.download",
    "convert": "slimecli.commands.convert",
    "prepare-data": "slimecli.commands.prepare_data",
    "serve": "slimecli.commands.serve",
    "rollout": "slimecli.commands.rollout",
    "train": "slimecli.commands.train",
    "eval": "slimecli.commands.eval",
    "export": "slimecli.commands.export",
    "reward": "slimecli.commands.reward",
    "models": "slimecli.commands.models",
    "recipes": "slimecli.commands.recipes",
    "init": "slimecli.commands.init",
    "runs": "slimecli.commands.runs",
    "watch": "slimecli.commands.watch",
    "report": "slimecli.commands.report",
    "doctor": "slimecli.commands.doctor",
    "completions": "slimecli.commands.completions",
}
"""command -> module; the module's `cli` is the Typer shell, `EXAMPLES` its examples"""


def build_app() -> typer.Typer:
    """The Typer app with every command of COMMANDS."""
    from slimecli.commands._options import epilog

    app = typer.Typer(
        name="slime",
        help="RL post-training of language models: every stage a command, `slime run` the whole loop.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        app.command(name, epilog=epilog(module.EXAMPLES))(module.cli)
    return app


def _global_options(
    debug: bool = typer.Option(False, "--debug", help="show tracebacks of expected errors too"),
) -> None:
    """RL post-training of language models: every stage a command, `slime run` the whole loop."""


def main() -> None:
    """Entry point of the `slime` command."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    debug = "--debug" in argv[:1]
    try:
        result = build_app()(argv, standalone_mode=False)
        return int(result) if isinstance(result, int) else ExitCode.OK
    except SlimeError as error:
        if debug:
            raise
        console.fail(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        console.fail("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return ExitCode.OK

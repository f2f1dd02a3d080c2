"""Option types shared by the commands, so that every command spells a flag the same way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

RunOpt = Annotated[str, typer.Option("--run", "-r", metavar="NAME|DIR", help="run directory; a bare name is runs/NAME")]
RecipeOpt = Annotated[str, typer.Option("--recipe", metavar="NAME|FILE", help="shipped recipe or TOML file")]
ModelOpt = Annotated[str, typer.Option("--model", metavar="NAME|DIR", help="registry name or local HF folder")]
SetOpt = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="override a recipe field, e.g. trainer.lr=1e-6; repeatable"),
]
MegatronArgs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- MEGATRON ARGUMENT",
        show_default=False,
        help="as Megatron-LM spells them, after `--`: -- --tensor-model-parallel-size 2",
    ),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="machine-readable result on stdout")]
AsOpt = Annotated[
    str,
    typer.Option(
        "--as",
        metavar="FORM[:RULE]",
        help="samples or sft (conversations); :best, :best=K, :passing, :min=X choose among a prompt's answers",
    ),
]
STDOUT = "-"
"""in place of a file: the standard output"""


def not_stdout(option: typer.CallbackParam, path: str) -> str:
    """Callback of options whose result is no text: `-` is refused."""
    from slimecli.errors import UsageError

    if path == STDOUT:
        named = option.opts[0]
        raise UsageError(
            f"{named} -: the result is a folder or an archive, and the standard output takes text",
            f"name a place; {named} ./- is one that is called so",
        )
    return path


OutOpt = Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="where the result goes", callback=not_stdout)]
TextOutOpt = Annotated[
    str, typer.Option("--out", "-o", metavar="FILE|-", help="where the result goes; - is the standard output")
]


def is_stdout(path: str, *, json_: bool) -> bool:
    """Whether the text goes to the standard output, which then has no room for --json."""
    if path == STDOUT:
        refuse_idle({"--json": json_}, "where the text itself goes to the standard output", "leave one of them out")
    return path == STDOUT


def refuse_idle(given: Mapping[str, object], why: str, fix: str) -> None:
    """Raise for options that were given and would have no effect.

    Args:
        given: option -> its value; an empty one was not given.
    """
    from slimecli.errors import UsageError

    if idle := [name for name, value in given.items() if value]:
        raise UsageError(f"{' and '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect {why}", fix)


def epilog(examples: list[str]) -> str:
    """Examples as they stand at the end of a command's help."""
    return "Examples:\n\n" + "\n\n".join(examples)


def with_fields(options: Callable[..., None], fields: Mapping[str, str]) -> type[TyperCommand]:
    """A kind of command with further flags that stand for recipe fields: `--replicas 2` is `--set engine.replicas=2`.

    Args:
        options: their Typer annotations, as parameters that default to None.
        fields: parameter -> recipe field.
    """
    app = typer.Typer(add_completion=False)
    app.command()(options)
    extra = [p for p in typer.main.get_command(app).params if p.name in fields]

    class Command(TyperCommand):
        def __init__(self, *args: Any, params: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, params=[*(params or []), *extra], **kwargs)

        def invoke(self, ctx: Any) -> Any:
            given = {name: ctx.params.pop(name) for name in fields}
            said = [f"{fields[name]}={json.dumps(value)}" for name, value in given.items() if value is not None]
            ctx.params["set_"] = [*(ctx.params["set_"] or []), *said]
            return super().invoke(ctx)

    return Command

"""Option types shared by the commands, so that every command spells a flag the same way."""

from __future__ import annotations

from typing import Annotated

import typer

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
OutOpt = Annotated[str, typer.Option("--out", "-o", metavar="PATH", help="where the result goes")]


def epilog(examples: list[str]) -> str:
    """Examples as they stand at the end of a command's help."""
    return "Examples:\n\n" + "\n\n".join(examples)

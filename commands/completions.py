"""`slime completions`: shell completion scripts, generated from the command line itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from slimecli.commands._options import JsonOpt, not_stdout

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = [
    "slime completions bash > ~/.local/share/bash-completion/completions/slime",
    "slime completions zsh > ~/.zfunc/_slime",
    "slime completions fish > ~/.config/fish/completions/slime.fish",
]

RUN_FLAGS = ("--run", "-r")
RECIPE_FLAGS = ("* --recipe", "init --from")
"""command and flag, as patterns of a shell"""


@dataclass(frozen=True, kw_only=True)
class Words:
    """Everything that can be completed without asking the file system."""

    commands: dict[str, str]
    """name -> first line of its help"""
    options: dict[str, dict[str, str]]
    """command -> flag -> what it takes, as its help says; empty for a switch"""
    actions: dict[str, list[str]]
    """command -> words that its arguments can be"""
    reads_files: list[str]
    """commands with an argument that is a file"""
    recipes: list[str]
    fields: list[str]
    """`section.key=` for --set"""


def collect_words() -> Words:
    """The words of the installed command line."""
    from slimecli.cli import COMMANDS, build_app
    from slimecli.recipe import recipe_fields, shipped_recipes

    group = typer.main.get_command(build_app())
    found = getattr(group, "commands")  # noqa: B009 -- Typer types it as a plain command
    arguments = {name: [_metavar(p) for p in found[name].params if not _flags(p)] for name in COMMANDS}
    return Words(
        commands={name: (found[name].help or "").partition("\n")[0].rstrip(".") for name in COMMANDS},
        options={
            name: {flag: _metavar(p) for p in found[name].params for flag in _flags(p)} | {"--help": ""}
            for name in COMMANDS
        },
        actions={name: [w for metavar in arguments[name] for w in _words_of(metavar)] for name in COMMANDS},
        reads_files=[name for name in COMMANDS if {"[DATA]", "[FILE]"} & set(arguments[name])],
        recipes=list(shipped_recipes()),
        fields=[f"{name}=" for name, _, _ in recipe_fields()],
    )


def _flags(parameter: object) -> list[str]:
    return [opt for opt in getattr(parameter, "opts") if opt.startswith("-")]  # noqa: B009


def _metavar(parameter: object) -> str:
    return "" if getattr(parameter, "is_flag", False) else str(getattr(parameter, "metavar", None) or "VALUE")


def _words_of(metavar: str) -> list[str]:
    """`[check|score]` -> check, score: what is written in small letters is meant literally."""
    words = metavar.strip("[]").split("|")
    return [word for word in words if re.fullmatch(r"[a-z0-9_-]+", word) and not word.startswith("-")]


def bash_script(words: Words) -> str:
    """Completion for bash 4 and later."""
    cases = "\n".join(
        f'    {name}) words="{" ".join([*words.actions[name], *words.options[name]])}" ;;' for name in words.commands
    )
    return f"""\
# Completion of slime for bash; made by `slime completions bash`.
_slime_runs() {{
  local file
  for file in "${{SLIME_RUNS:-runs}}"/*/run.json; do
    [[ -e $file ]] && basename "$(dirname "$file")"
  done
}}
_slime() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command="" words="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    if [[ ${{COMP_WORDS[i]}} != -* ]]; then command=${{COMP_WORDS[i]}}; break; fi
  done
  case "$command $prev" in
    {_any(RUN_FLAGS)}) COMPREPLY=($(compgen -W "$(_slime_runs)" -- "$cur") $(compgen -d -- "$cur")); return ;;
    {_patterns(RECIPE_FLAGS)}) COMPREPLY=($(compgen -W "{" ".join(words.recipes)}" -- "$cur") $(compgen -f -- "$cur"))
      return ;;
    *" --set") COMPREPLY=($(compgen -W "{" ".join(words.fields)}" -- "$cur")); compopt -o nospace; return ;;
  esac
  case $command in
    "") words="{" ".join(words.commands)} --help --version --debug" ;;
{cases}
  esac
  case $command in
    runs|watch|report) words="$words $(_slime_runs)" ;;
    recipes) words="$words {" ".join(words.recipes)}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  [[ ${{#COMPREPLY[@]}} -eq 0 ]] && COMPREPLY=($(compgen -f -- "$cur"))
}}
complete -F _slime slime
"""


def _any(flags: tuple[str, ...]) -> str:
    """A `case` pattern: one of these flags, whatever the command."""
    return _patterns(tuple(f"* {flag}" for flag in flags))


def _patterns(pairs: tuple[str, ...]) -> str:
    return "|".join(f'*"{pair.removeprefix("*")}"' if pair.startswith("*") else f'"{pair}"' for pair in pairs)


def zsh_script(words: Words) -> str:
    """Completion for zsh; goes into a folder of $fpath as _slime."""
    cases = "\n".join(
        f"    {name}) options=({' '.join([*words.actions[name], *words.options[name]])}) ;;" for name in words.commands
    )
    described = "\n".join(f"    '{name}:{_quoted(text)}'" for name, text in words.commands.items())
    return f"""\
#compdef slime
# Completion of slime for zsh; made by `slime completions zsh`.
_slime() {{
  local -a runs recipes fields commands options
  local command="" i
  runs=(${{SLIME_RUNS:-runs}}/*/run.json(N:h:t))
  recipes=({" ".join(words.recipes)})
  fields=({" ".join(words.fields)})
  commands=(
{described}
  )
  for ((i = 2; i < CURRENT; i++)); do
    if [[ $words[i] != -* ]]; then command=$words[i]; break; fi
  done
  case "$command $words[CURRENT-1]" in
    {_any(RUN_FLAGS)}) compadd -a runs; _files -/; return ;;
    {_patterns(RECIPE_FLAGS)}) compadd -a recipes; _files -g '*.toml'; return ;;
    *" --set") compadd -S '' -a fields; return ;;
  esac
  case $command in
    '') _describe command commands; compadd -- --help --version --debug; return ;;
{cases}
  esac
  case $command in
    runs|watch|report) compadd -a runs ;;
    recipes) compadd -a recipes ;;
  esac
  compadd -- $options
  _files
}}
_slime "$@"
"""


def fish_script(words: Words) -> str:
    """Completion for fish."""
    lines = [
        "# Completion of slime for fish; made by `slime completions fish`.",
        "function __slime_runs",
        "    set -l root runs",
        "    set -q SLIME_RUNS; and set root $SLIME_RUNS",
        "    for file in $root/*/run.json",
        "        basename (dirname $file)",
        "    end",
        "end",
        "complete -c slime -f",
        "complete -c slime -n __fish_use_subcommand -l version -l debug -l help",
    ]
    for name, text in words.commands.items():
        lines.append(f"complete -c slime -n __fish_use_subcommand -a {name} -d '{_quoted(text)}'")
    for name, flags in words.options.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for action in words.actions[name]:
            lines.append(f"complete -c slime {seen} -a {action}")
        for flag, metavar in flags.items():
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            lines.append(f"complete -c slime {seen} {kind}{_fish_values(f'{name} {flag}', metavar, words)}")
    lines.append(f"complete -c slime -n '__fish_seen_subcommand_from {' '.join(words.reads_files)}' -F")
    lines.append("complete -c slime -n '__fish_seen_subcommand_from runs watch report' -a '(__slime_runs)'")
    lines.append(f"complete -c slime -n '__fish_seen_subcommand_from recipes' -a '{' '.join(words.recipes)}'")
    return "\n".join(lines) + "\n"


def _fish_values(place: str, metavar: str, words: Words) -> str:
    """What may follow a flag; `place` is "COMMAND FLAG"."""
    if not metavar:
        return ""
    if place.endswith(tuple(f" {flag}" for flag in RUN_FLAGS)):
        return " -x -a '(__slime_runs)'"
    if place.endswith(" --set"):
        return f" -x -a '{' '.join(words.fields)}'"
    if any(place.endswith(p.removeprefix("*")) if p.startswith("*") else place == p for p in RECIPE_FLAGS):
        return f" -r -F -a '{' '.join(words.recipes)}'"
    if re.search(r"FILE|DIR|PATH", metavar):
        return " -r -F"
    return f" -x -a '{' '.join(_words_of(metavar))}'"


def _quoted(text: str) -> str:
    """Text inside single quotes of zsh and fish."""
    return text.replace("'", "").replace(":", " -")


SCRIPTS: dict[str, Callable[[Words], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
"""shell -> its script"""


def write_all(folder: str) -> list[str]:
    """Write slime.bash, slime.zsh and slime.fish into a folder and return their paths."""
    from pathlib import Path

    from slimecli import files

    words = collect_words()
    paths = {shell: Path(folder) / f"slime.{shell}" for shell in SCRIPTS}
    for shell, path in paths.items():
        files.write_text(path, SCRIPTS[shell](words))
    return [str(p) for p in paths.values()]


def cli(
    shell: Annotated[str, typer.Argument(metavar="[bash|zsh|fish]", help="whose script to print")] = "",
    write: Annotated[
        str, typer.Option("--write", metavar="DIR", help="write all three scripts there", callback=not_stdout)
    ] = "",
    json_: JsonOpt = False,
) -> None:
    """Print the completion script of a shell."""
    from slimecli import console
    from slimecli.errors import UsageError, nearest

    if write:
        paths = write_all(write)
        console.emit({"files": paths}) if json_ else console.emit_line("\n".join(paths))
        return
    if shell not in SCRIPTS:
        raise UsageError(f"no script for {shell!r}{nearest(shell, list(SCRIPTS))}", f"shells: {', '.join(SCRIPTS)}")
    text = SCRIPTS[shell](collect_words())
    console.emit({"shell": shell, "script": text}) if json_ else console.emit_line(text.rstrip("\n"))

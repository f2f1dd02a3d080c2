"""Megatron's arguments as they stand after `--` on the command line, turned into overrides of the recipe."""

from __future__ import annotations

from collections.abc import Sequence

from slimecli.errors import UsageError


def megatron_overrides(words: Sequence[str]) -> tuple[str, ...]:
    """`--tensor-model-parallel-size 2 --sequence-parallel` -> `megatron.tensor-model-parallel-size=2`, ...=true.

    Raises UsageError for a word that is no flag, and for a flag with several values.
    """
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, sep, value = word[2:].partition("=")
            found.append((name, [value] if sep else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise UsageError(
                f"{word!r} is no option",
                "options begin with --, see --help; Megatron's arguments come last: -- --tensor-model-parallel-size 2",
            )
    for name, values in found:
        if len(values) > 1:
            raise UsageError(
                f"--{name} has {len(values)} values: {' '.join(values)}", f"a list is one word: --{name} '[1, 2]'"
            )
    return tuple(f"megatron.{name}={values[0] if values else 'true'}" for name, values in found)

"""Flags turned into overrides of the recipe: Megatron's after `--`, SGLang's, and slime's lists of evaluation sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath

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


EVAL_DATA = "--eval-prompt-data"


def expand_eval_data(argv: Sequence[str]) -> list[str]:
    """`--eval-prompt-data NAME PATH [NAME PATH ...]` -> `--set eval.sets={...}`: a list is nothing a parser knows.

    A single word is a path, named by its file. The list ends at the next option.
    """
    if EVAL_DATA not in argv:
        return list(argv)
    start = argv.index(EVAL_DATA)
    end = next((i for i in range(start + 1, len(argv)) if argv[i].startswith("-")), len(argv))
    words = list(argv[start + 1 : end])
    if len(words) == 1:
        words = [PurePath(words[0].partition("@[")[0]).stem, words[0]]
    if not words or len(words) % 2:
        raise UsageError(
            f"{EVAL_DATA} takes pairs of a name and a path, and got: {' '.join(words) or 'nothing'}",
            f"write {EVAL_DATA} aime aime.jsonl gsm8k gsm8k.jsonl",
        )
    pairs = zip(words[::2], words[1::2], strict=True)
    listed = ", ".join(f"{json.dumps(name)} = {json.dumps(path)}" for name, path in pairs)
    return [*argv[:start], "--set", f"eval.sets={{{listed}}}", *expand_eval_data(argv[end:])]


RAY_ADDRESS = "--ray-address"


def expand_ray_address(argv: Sequence[str]) -> list[str]:
    """`--ray-address HOST:PORT` -> `--set cluster.address=HOST:PORT`, with Ray as the backend."""
    out: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            return [*out, word, *words]
        name, sep, value = word.partition("=")
        if name != RAY_ADDRESS:
            out.append(word)
            continue
        address = value if sep else next(words, "")
        if not address or address.startswith("-"):
            raise UsageError(f"{RAY_ADDRESS} needs an address", f"{RAY_ADDRESS} 10.0.0.1:6379, or auto")
        out += ["--set", f"cluster.address={json.dumps(address)}", "--set", "cluster.backend='ray'"]
    return out


PASSED_ON = {"--sglang-router-": "router", "--router-": "router", "--sglang-": "sglang"}
"""beginning of a flag -> the recipe's table of what another program is given; the first that fits"""


def expand_sglang(argv: Sequence[str]) -> list[str]:
    """`--sglang-tp-size 2 --router-policy round_robin` -> `--set sglang.tp-size=2 --set router.policy=round_robin`.

    The words up to the next option are an argument's values; several of them are a list, none is `true`. What stands
    after `--` is Megatron's.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    out: list[str] = []
    at = 0
    while at < end:
        word = argv[at]
        at += 1
        prefix = next((p for p in PASSED_ON if word.startswith(p)), "")
        if not prefix:
            out.append(word)
            continue
        name, sep, value = word.removeprefix(prefix).partition("=")
        values = [value] if sep else []
        while not sep and at < end and not argv[at].startswith("--"):
            values.append(argv[at])
            at += 1
        said = "true" if not values else values[0] if len(values) == 1 else json.dumps(values)
        out += ["--set", f"{PASSED_ON[prefix]}.{name}={said}"]
    return [*out, *argv[end:]]


def expanded(argv: Sequence[str]) -> list[str]:
    """A command line with everything above written as --set."""
    return expand_sglang(expand_eval_data(expand_ray_address(argv)))

"""What `slime plan` says of SGLang servers that slime starts: what it decides for them, and what deserves a look."""

from __future__ import annotations

from slimecli.engines.sglang.arguments import decided
from slimecli.plan_numbers import Value
from slimecli.recipe import Recipe


def sglang_values(recipe: Recipe, *, on_gpu: bool) -> list[Value]:
    """What slime tells SGLang's servers besides `[sglang]`."""
    if not _starts_sglang(recipe):
        return []
    rows = decided(recipe, on_gpu=on_gpu)
    return [Value(group="sglang", name=name, value=str(value), unit="", reason=why) for name, value, why in rows]


def sglang_warnings(recipe: Recipe, *, on_gpu: bool) -> list[str]:
    """What deserves a look where slime starts SGLang servers."""
    if not _starts_sglang(recipe):
        return []
    given = {name.replace("-", "_") for name in recipe.sglang}
    found = []
    if not on_gpu:
        found.append("SGLang on a CPU is for tests: the embedded engine answers several times as fast there")
    elif not given & {"enable_deterministic_inference", "rl_on_policy_target"}:
        found.append(
            "SGLang ignores the seeds of answers without [sglang] enable_deterministic_inference = true: "
            "a second run gives other answers"
        )
    if recipe.engine.host not in ("127.0.0.1", "localhost", "::1") and not recipe.engine.api_key_env:
        found.append(
            f"engine.host = {recipe.engine.host!r} without engine.api_key_env: whoever reaches the servers can change "
            "their weights"
        )
    return found


def _starts_sglang(recipe: Recipe) -> bool:
    return recipe.engine.backend == "sglang" and not recipe.engine.urls and recipe.steps > 0

"""What slime's users import from it, made of slimecli's parts. Only plugin files see these names: slimecli.compat."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

from slimecli.errors import nearest
from slimecli.lookup import look_up

_ANSWERS = "slimecli.shim.scoring"
_RM = {name: f"{_ANSWERS}:{name}" for name in ("async_rm", "batched_async_rm")}
_MATH = {
    "extract_answer": "slimecli.data_tools.rewards.extract:extract_boxed",
    "extract_boxed_answer": "slimecli.data_tools.rewards.extract:extract_boxed",
    **{name: f"{_ANSWERS}:{name}" for name in ("grade_answer_mathd", "grade_answer_sympy", "grade_answer_verl")},
}
_ROLLOUT = {
    name: f"slimecli.shim.rollout:{name}"
    for name in ("GenerateState", "generate", "generate_and_rm", "generate_and_rm_group", "get_model_url")
}

SURFACE: dict[str, dict[str, str]] = {
    "slime": {},
    "slime.rollout": {},
    "slime.rollout.base_types": {
        "RolloutFnTrainOutput": "slimecli.shim.outputs:RolloutFnTrainOutput",
        "RolloutFnEvalOutput": "slimecli.shim.outputs:RolloutFnEvalOutput",
    },
    "slime.rollout.data_source": {"pop_first": "slimecli.shim.outputs:pop_first"},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": "slimecli.shim.outputs:DynamicFilterOutput"},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "DynamicFilterOutput": "slimecli.shim.outputs:DynamicFilterOutput",
        "check_reward_nonzero_std": "slimecli.data_tools.filters:zero_variance",
        "check_reward_nonzero_std_with_fallback": "slimecli.data_tools.filters:zero_variance_with_fallback",
    },
    "slime.rollout.rm_hub": _RM,
    "slime.rollout.rm_hub.deepscaler": {"get_deepscaler_rule_based_reward": f"{_ANSWERS}:deepscaler"},
    "slime.rollout.rm_hub.f1": {"f1_score": f"{_ANSWERS}:f1_score"},
    "slime.rollout.rm_hub.gpqa": {"compute_gpqa_reward": f"{_ANSWERS}:gpqa"},
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": f"{_ANSWERS}:dapo"},
    "slime.rollout.rm_hub.math_utils": _MATH,
    "slime.rollout.sglang_rollout": _ROLLOUT,
    "slime.utils": {},
    "slime.utils.async_utils": {"run": "slimecli.shim.http:run"},
    "slime.utils.http_utils": {name: f"slimecli.shim.http:{name}" for name in ("get", "post", "find_available_port")},
    "slime.utils.mask_utils": {
        name: f"slimecli.shim.text:{name}" for name in ("MultiTurnLossMaskGenerator", "get_response_lengths")
    },
    "slime.utils.misc": {
        "SingletonMeta": "slimecli.shim.outputs:SingletonMeta",
        "load_function": "slimecli.data_tools.hooks:load_object",
    },
    "slime.utils.processing_utils": {
        name: f"slimecli.shim.text:{name}"
        for name in ("load_processor", "load_tokenizer", "encode_image_for_rollout_engine")
    },
    "slime.utils.types": {"Sample": "slimecli.shim.sample:Sample"},
}
"""module of slime -> name in it -> what a plugin gets"""


class _Module(ModuleType):
    """A module of slime whose names are looked up when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        inner = f"{self.__name__}.{name}"
        if inner in SURFACE:
            return _module(inner)
        if name.startswith("__"):
            raise AttributeError(name)
        known = SURFACE[self.__name__]
        if name not in known:
            raise ImportError(_missing(inner, [f"{self.__name__}.{k}" for k in known]), name=self.__name__)
        found = look_up(known, name, "name of slime")
        setattr(self, name, found)
        return found


def offered(name: str, fromlist: Sequence[str]) -> ModuleType:
    """What `__import__` gives for a module of slime: the module for `from ... import`, else the topmost package."""
    module = _module(name)
    for wanted in fromlist:
        if wanted != "*":
            getattr(module, wanted)
    return module if fromlist else _module(name.partition(".")[0])


@cache
def _module(name: str) -> ModuleType:
    if name not in SURFACE:
        raise ModuleNotFoundError(_missing(name, list(SURFACE)), name=name)
    module = _Module(name, f"slimecli's {name}")
    vars(module).update(__path__=[], __all__=list(SURFACE[name]))
    return module


def _missing(name: str, known: list[str]) -> str:
    return f"slimecli does not offer {name}{nearest(name, known)}; it offers {', '.join(known) or 'nothing of it'}"

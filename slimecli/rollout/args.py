"""The recipe as hooks see it: read-only attributes under the flag names that slime's users know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from slimecli.errors import SlimeError, nearest
from slimecli.protocols import RolloutEngine
from slimecli.recipe import Recipe
from slimecli.rollout.served import Models, addresses

FLAGS: dict[str, str] = {
    "hf_checkpoint": "model.path",
    "num_rollout": "steps",
    "rollout_seed": "seed",
    "seed": "seed",
    "prompt_data": "data.train",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "metadata_key": "data.metadata_key",
    "tool_key": "data.tool_key",
    "apply_chat_template": "data.apply_chat_template",
    "rollout_max_prompt_len": "data.max_prompt_tokens",
    "rollout_shuffle": "data.shuffle",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "rollout_max_response_len": "rollout.max_response_tokens",
    "rollout_max_context_len": "max_context",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_top_k": "rollout.top_k",
    "rollout_stop": "rollout.stop",
    "rollout_stop_token_ids": "rollout.stop_token_ids",
    "over_sampling_batch_size": "rollout.over_sampling_batch_size",
    "dynamic_sampling_filter_path": "rollout.dynamic_filter",
    "partial_rollout": "rollout.partial",
    "mask_offpolicy_in_partial_rollout": "rollout.mask_off_policy_tokens",
    "buffer_filter_path": "rollout.buffer_filter",
    "data_source_path": "rollout.data_source",
    "update_weights_interval": "sync.interval",
    "custom_generate_function_path": "rollout.custom_generate",
    "sglang_server_concurrency": "rollout.concurrency",
    "rm_type": "reward.type",
    "rm_url": "reward.rm_url",
    "custom_rm_path": "reward.path",
    "reward_key": "reward.key",
    "group_rm": "reward.group",
    "advantage_estimator": "algo.name",
    "eps_clip": "algo.eps_clip",
    "eps_clip_high": "algo.eps_clip_high",
    "eps_clip_c": "algo.dual_clip",
    "kl_loss_type": "algo.kl_type",
    "use_unbiased_kl": "algo.kl_unbiased",
    "gamma": "algo.gamma",
    "lambd": "algo.gae_lambda",
    "value_clip": "algo.value_clip",
    "num_critic_only_steps": "algo.critic_warmup",
    "rewards_normalization": "algo.rewards_normalization",
    "grpo_std_normalization": "algo.std_normalization",
    "tis_clip": "algo.correction.high",
    "tis_clip_low": "algo.correction.low",
    "opsm_delta": "algo.opsm_delta",
    "entropy_coef": "algo.entropy_coef",
    "global_batch_size": "trainer.global_batch_size",
    "num_steps_per_rollout": "trainer.steps_per_rollout",
    "max_tokens_per_gpu": "trainer.max_tokens_per_micro_batch",
    "lr": "trainer.lr",
    "eval_temperature": "eval.temperature",
    "eval_top_p": "eval.top_p",
    "eval_top_k": "eval.top_k",
    "n_samples_per_eval_prompt": "eval.n_samples_per_prompt",
    "eval_interval": "eval.interval",
}
"""slime's flag name -> where it lives in the recipe"""

DERIVED: dict[str, Callable[[Recipe], Any]] = {
    "loss_type": lambda r: "sft_loss" if r.algo.name == "sft" else "policy_loss",
    "use_critic": lambda r: r.algo.name == "ppo",
    "use_kl_loss": lambda r: r.algo.kl_in_loss,
    "kl_loss_coef": lambda r: r.algo.kl_coef if r.algo.kl_in_loss else 0.0,
    "kl_coef": lambda r: r.algo.kl_coef if r.algo.kl_in_reward else 0.0,
    "normalize_advantages": lambda r: r.algo.whiten_advantages or r.algo.name.startswith("reinforce_plus_plus"),
    "calculate_per_token_loss": lambda r: r.algo.aggregation == "token",
    "use_rollout_logprobs": lambda r: r.algo.old_log_probs == "engine",
    "use_tis": lambda r: r.algo.correction.level != "none",
    "use_opsm": lambda r: r.algo.opsm_delta > 0,
    "eval_max_response_len": lambda r: r.eval.max_response_tokens or r.rollout.max_response_tokens,
    "apply_chat_template_kwargs": lambda r: {},
    "rollout_skip_special_tokens": lambda r: True,
    "multimodal_keys": lambda r: None,
    "use_rollout_routing_replay": lambda r: False,
    "sglang_enable_deterministic_inference": lambda r: True,
    "sglang_speculative_algorithm": lambda r: None,
    "sglang_router_policy": lambda r: "consistent_hashing",
    "router_policy": lambda r: "consistent_hashing",
    "ci_test": lambda r: False,
}
"""slime's flag name -> what the recipe says about it in other words"""


_ADDRESS = {"sglang_router_ip": "hostname", "sglang_router_port": "port"}


class HookArgs:
    """`args` of every hook.

    Beyond the recipe it carries `recipe` itself, the engine's address as `sglang_router_ip` and `_port`, and for hooks
    that run in slime's own process the open `engine` and the model's `tokenizer`.

    Args:
        model_dir: folder of the model, as `hf_checkpoint`; empty: model.path.
        models: frozen models that are served; hooks find their addresses in `sglang_model_routers`.
    """

    def __init__(
        self,
        recipe: Recipe,
        host: str = "",
        port: int = 0,
        *,
        engine: RolloutEngine | None = None,
        tokenizer: Any = None,
        model_dir: str = "",
        models: Models | None = None,
    ) -> None:
        fixed = {"recipe": recipe, "sglang_router_ip": host, "sglang_router_port": port}
        fixed |= {"engine": engine, "tokenizer": tokenizer}
        fixed |= {"hf_checkpoint": model_dir} if model_dir else {}
        fixed["models"] = models or {}
        object.__setattr__(self, "_fixed", fixed)
        object.__setattr__(self, "_own", None)

    def with_recipe(self, recipe: Recipe) -> HookArgs:
        """The same, of another recipe."""
        other = HookArgs(recipe)
        kept = {k: v for k, v in self._fixed.items() if k not in ("plugins", "reward", "generate_state")}
        other._fixed.update({**kept, "recipe": recipe})
        return other

    def for_plugins(self) -> HookArgs:
        """The same with room for a plugin's own values, as slime's namespace has; one for all plugins."""
        if self._own is not None:
            return self
        if "plugins" not in self._fixed:
            self._fixed["plugins"] = self.__copy__()
        shared: HookArgs = self._fixed["plugins"]
        return shared

    def __copy__(self) -> HookArgs:
        """A copy takes values of its own; the recipe, the engine and the tokenizer stay shared."""
        other = HookArgs(self.recipe)
        object.__setattr__(other, "_fixed", self._fixed)
        object.__setattr__(other, "_own", dict(self._own or {}))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> HookArgs:
        return self.__copy__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._own is not None and name in self._own:
            return self._own[name]
        if name in _ADDRESS and (url := getattr(self._fixed["engine"], "address", "")):
            return getattr(urlsplit(url), _ADDRESS[name])  # an engine that was started anew listens elsewhere
        if name == "sglang_model_routers":
            return addresses(self._fixed["models"])
        if name in self._fixed:
            return self._fixed[name]
        if name in DERIVED:
            return DERIVED[name](self._fixed["recipe"])
        if name not in FLAGS:
            known = [*FLAGS, *DERIVED]
            raise AttributeError(f"args has no {name!r}{nearest(name, known)}; own values: args.recipe")
        value: Any = self._fixed["recipe"]
        for part in FLAGS[name].split("."):
            value = getattr(value, part)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if self._own is None:
            raise SlimeError(
                f"a hook tried to set args.{name}",
                "args is read-only; keep state in your own module, or in a copy of args",
            )
        self._own[name] = value

"""slime's Sample, as plugins make and change it. It is slimecli's, with the rest of slime's surface."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimecli import types
from slimecli.errors import DataError
from slimecli.rollout.segments import FINISHED
from slimecli.types import SampleStatus


@dataclass
class SpecCounters:
    """Counters of speculative decoding."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any], response_length: int = 0) -> None:
        """Add what one reply counted."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", response_length)

    @property
    def spec_accept_rate(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens per verification."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class CacheCounters:
    """Counters of the engine's prefix cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add what one reply counted."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of prompt tokens that the cache held."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


class _AnySample(type):
    """slimecli's samples count as slime's in `isinstance`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, types.Sample)


@dataclass(kw_only=True)
class Sample(types.Sample, metaclass=_AnySample):
    """slimecli's Sample, and what slime's has besides. The fields here are not recorded and not trained with."""

    Status = SampleStatus
    SpecInfo = SpecCounters
    PrefixCacheInfo = CacheCounters

    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    rollout_top_p_token_ids: Any = None
    rollout_top_p_offsets: Any = None
    rollout_routed_experts: Any = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    spec_info: SpecCounters = field(default_factory=SpecCounters)
    prefix_cache_info: CacheCounters = field(default_factory=CacheCounters)

    def get_reward_value(self, key: Any = None) -> float:
        """The score as one number; slime gives `args`, of which reward_key counts."""
        return super().get_reward_value(key if key is None or isinstance(key, str) else key.reward_key or None)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str = "",
        update_terminal_info: bool = True,
    ) -> None:
        """Add tokens to the response: the model's (trainable, with log-probs) or the environment's (mask 0)."""
        count = len(tokens)
        if trainable and (log_probs is None or len(log_probs) != count):
            raise DataError(f"{count} trainable tokens need as many log-probs", "ask the engine with return_logprob")
        mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        known = [0.0] * self.response_length if self.rollout_log_probs is None else self.rollout_log_probs
        self.loss_mask = [*mask, *([int(trainable)] * count)]
        self.rollout_log_probs = [*known, *(log_probs if trainable and log_probs else [0.0] * count)]
        self.tokens = [*self.tokens, *tokens]
        self.response += text
        self.response_length += count
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(args, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Status, weight version and counters of one reply."""
        self.status = FINISHED[meta_info["finish_reason"]["type"]]
        if "weight_version" in meta_info and str(meta_info["weight_version"]) not in self.weight_versions:
            self.weight_versions.append(str(meta_info["weight_version"]))
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """As slime's: an unknown key becomes an attribute."""
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        sample = cls(**{**known, "status": SampleStatus(data.get("status", "pending"))})
        for name in data.keys() - known.keys():
            setattr(sample, name, data[name])
        return sample


class JsonLabel(str):
    """A label that stands in the data as an object: text for slimecli, and a dict for who asks by name."""

    def __getitem__(self, key: Any) -> Any:
        return json.loads(self)[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        return json.loads(self).get(key, default)


def adopted(sample: types.Sample) -> Sample:
    """The same object, from now on with slime's surface."""
    if type(sample) is types.Sample:
        sample.__class__ = Sample
        for name, info in Sample.__dataclass_fields__.items():
            if name not in vars(sample):
                made = info.default_factory
                vars(sample)[name] = info.default if not callable(made) else made()
        if isinstance(sample.label, str) and sample.label.startswith("{"):
            sample.label = _json_label(sample.label)
    return sample  # type: ignore[return-value]  # its class was changed above


def _json_label(text: str) -> str:
    try:
        return JsonLabel(text) if isinstance(json.loads(text), dict) else text
    except ValueError:
        return text

"""How answers are generated and evaluated. The string under each field is its help text, unit included."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from slimecli.recipe_sections import Section


class RolloutSection(Section):
    """How answers are generated."""

    batch_size: int = Field(32, gt=0)
    """prompts per rollout"""
    n_samples_per_prompt: int = Field(8, gt=0)
    """answers per prompt: the group"""
    max_response_tokens: int = Field(1024, gt=0)
    """token budget of an answer (tokens)"""
    temperature: float = Field(1.0, ge=0)
    """sampling temperature; the trainer divides its logits by the same number"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus mass; below 1 the policy ratio is biased"""
    top_k: int = Field(-1, ge=-1)
    """keep the k likeliest tokens; -1: all"""
    min_p: float = Field(0.0, ge=0, le=1)
    """drop tokens below this share of the likeliest one's probability"""
    stop: list[str] = []
    """stop strings"""
    stop_token_ids: list[int] = []
    """stop tokens besides the tokenizer's end token"""
    over_sampling_batch_size: int = Field(0, ge=0)
    """prompts requested at a time when groups may be filtered out; 0: batch_size"""
    dynamic_filter: str = ""
    """drop groups: `zero-variance`, `module:function` or `file.py:function`; empty: keep all"""
    max_filtered_rounds: int = Field(16, gt=0)
    """rounds of re-sampling before a step that the filter starves is an error"""
    custom_generate: str = ""
    """own generate function, `module:function` or `file.py:function`; `tool_loop` is slime's own, see [tools]"""
    on_prefix_break: Literal["segment", "error"] = "segment"
    """what `tool_loop` does when the chat template tells earlier turns differently (drops thinking): `segment` trains
    on the parts as samples of their own, `error` fails the answer"""
    concurrency: int = Field(512, gt=0)
    """answers in flight per engine"""
    request_timeout_s: float = Field(600.0, gt=0)
    """deadline of one answer (seconds)"""
    max_retries: int = Field(2, ge=0)
    """further tries after a lost connection"""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """share of failed answers in a step above which the step is an error"""
    max_staleness: int = Field(0, ge=0)
    """versions that an answer's weights may lie behind those of the step that trains on it; 0: rollout and training
    take turns; above 0 they overlap"""
    fully_async: bool = False
    """generation never stops: weights change under running answers; needs max_staleness = 1 or more"""
    partial: bool = False
    """stop what still runs once batch_size groups are accepted, and continue those answers at a later step"""
    stream: bool = False
    """have answers told while they are said: what was said by an engine that died, or until the deadline, is kept, and
    the answer goes on from there elsewhere"""
    partial_staleness: int = Field(8, gt=0)
    """versions that the oldest token of a continued answer may lie behind, beyond max_staleness"""
    mask_off_policy_tokens: bool = False
    """of a group that was continued, train only on what was said since then"""
    stale: Literal["drop", "mask"] = "drop"
    """an answer with tokens that are too old: `drop` begins it anew, `mask` does not train on these tokens"""
    data_source: str = ""
    """own data source instead of data.train, `module:Class` or `file.py:Class`"""
    buffer_filter: str = ""
    """own choice of the waiting groups that come next, `module:function` or `file.py:function`; empty: the first"""

    @property
    def overlaps(self) -> bool:
        """Whether answers are generated while the trainer learns."""
        return self.max_staleness > 0

    @property
    def oldest(self) -> int:
        """Versions that the oldest token of an answer may lie behind the step that trains on it."""
        return self.max_staleness + (self.partial_staleness if self.partial else 0)


class EvalSetSection(Section):
    """One evaluation set. A field that is left out is as in [eval], [data], [reward] and [rollout].

    A set that is nothing but a file may be written as its path.
    """

    path: str
    """data file: .jsonl or .parquet, with optional slice"""
    n_samples_per_prompt: int | None = Field(None, gt=0)
    """answers per prompt"""
    temperature: float | None = Field(None, ge=0)
    """sampling temperature of sampled evaluation"""
    top_p: float | None = Field(None, gt=0, le=1)
    """nucleus mass"""
    top_k: int | None = Field(None, ge=-1)
    """keep the k likeliest tokens; -1: all"""
    max_response_tokens: int | None = Field(None, gt=0)
    """token budget (tokens)"""
    max_prompt_tokens: int | None = Field(None, gt=0)
    """longest prompt; a longer one is an error (tokens)"""
    max_prompts: int | None = Field(None, ge=0)
    """use only the first so many prompts; 0: all"""
    stop: list[str] | None = None
    """stop strings"""
    input_key: str | None = None
    """column with the prompt"""
    label_key: str | None = None
    """column with the answer"""
    metadata_key: str | None = None
    """column with free data"""
    tool_key: str | None = None
    """column with tool definitions"""
    convert: str | None = None
    """how rows become prompt, label and metadata, see `data.convert`"""
    system_prompt: str | None = None
    """put before every prompt"""
    prompt_template: str | None = None
    """text around every prompt, with {prompt} where that goes"""
    apply_chat_template: bool | None = None
    """render prompts with the chat template"""
    reward: str | None = None
    """scorer: a built-in name, or file.py:function; a row's metadata.rm_type still overrides a built-in one"""
    reward_key: str | None = None
    """which of several named scores counts"""
    reward_group: bool | None = None
    """score whole groups at once; beside an own `reward` it is false where it is left out"""
    custom_generate: str | None = None
    """own generate function"""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | EvalSetSection):
            raise ValueError('a set is a data file, or a table: {path = "FILE", n_samples_per_prompt = 8}')
        return {"path": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _stated(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any] | str:
        """What was stated: a recipe's resolved form says no more about a set than its author did."""
        stated = {k: v for k, v in handler(self).items() if v is not None}
        return self.path if stated.keys() == {"path"} else stated


class EvalSection(Section):
    """Held-out evaluation, in the loop and by `slime eval`."""

    interval: int = Field(0, ge=0)
    """evaluate every so many steps, before the first and after the last; 0: never (`slime eval` does it by hand)"""
    sets: dict[str, EvalSetSection] = {}
    """name -> data file, or table {path, n_samples_per_prompt, temperature, reward, ...}; `holdout` (what prepare-data
    kept out) is added by itself"""
    seed: int = Field(0, ge=0, lt=2**31)
    """root of the answers' seeds; apart from `seed`, so that runs of several seeds are scored alike"""
    n_samples_per_prompt: int = Field(1, gt=0)
    """answers per prompt of sampled evaluation"""
    temperature: float = Field(1.0, ge=0)
    """sampling temperature of sampled evaluation; 0 is greedy"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus mass of sampled evaluation"""
    top_k: int = Field(-1, ge=-1)
    """keep the k likeliest tokens in sampled evaluation; -1: all"""
    greedy: bool = True
    """also report greedy accuracy: by `slime eval`, and at the start and the end of a run"""
    max_response_tokens: int = Field(0, ge=0)
    """token budget; 0: as in rollout (tokens)"""
    max_prompts: int = Field(0, ge=0)
    """use only the first so many prompts of each set; 0: all"""

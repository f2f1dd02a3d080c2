"""How answers are generated and evaluated. The string under each field is its help text, unit included."""

from __future__ import annotations

from pydantic import Field

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
    """own generate function, `module:function` or `file.py:function`"""
    concurrency: int = Field(512, gt=0)
    """answers in flight per engine"""
    request_timeout_s: float = Field(600.0, gt=0)
    """deadline of one answer (seconds)"""
    max_retries: int = Field(2, ge=0)
    """further tries after a lost connection"""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """share of failed answers in a step above which the step is an error"""


class EvalSection(Section):
    """Held-out evaluation, in the loop and by `slime eval`."""

    interval: int = Field(0, ge=0)
    """evaluate every so many steps, before the first and after the last; 0: never (`slime eval` does it by hand)"""
    sets: dict[str, str] = {}
    """name -> data file; `holdout` (what prepare-data kept out) is added by itself"""
    n_samples_per_prompt: int = Field(1, gt=0)
    """answers per prompt"""
    temperature: float = Field(1.0, ge=0)
    """sampling temperature of sampled evaluation; 0 is greedy"""
    greedy: bool = True
    """also report greedy accuracy, at the start and the end of the run"""
    max_response_tokens: int = Field(0, ge=0)
    """token budget; 0: as in rollout (tokens)"""
    max_prompts: int = Field(0, ge=0)
    """use only the first so many prompts of each set; 0: all"""

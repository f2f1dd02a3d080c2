"""SGLang's `/generate` payload, checked and taken apart. What is not understood is refused by name."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slimecli.errors import UsageError, nearest

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default"""
MOST_STOPS = 1024
"""strings or tokens that end an answer: each is looked for after every token, whoever's answer it is"""
LARGEST_BIAS = 1e30
"""of a logit: what is added stays a number in 16 bits too"""


class BadRequest(UsageError):
    """The caller's payload is wrong: HTTP 400."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of one answer."""

    seed: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """end tokens of the model (unless ignore_eos) and the request's own"""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    said_before: int = 0
    """last tokens of the prompt that are the beginning of this answer: random choices go on after theirs"""
    penalised: bool = False
    cuts: bool = False
    """top_k, top_p or min_p cut something"""


@dataclass(kw_only=True, eq=False)
class Request:
    """One answer in the making. Belongs to the engine's thread once submitted."""

    rid: str
    family: str
    """the rid the caller gave, where n or a list made several of it"""
    prompt: list[int]
    sampling: Sampling
    finish: Callable[[dict[str, Any]], None]
    """called once, from the engine's thread, with the reply"""
    fail: Callable[[Exception], None]
    """called instead when the engine fails"""
    on_tokens: Callable[[dict[str, Any]], None] | None = None
    """streaming: called after each token with the reply so far"""
    return_logprob: bool = False
    logprob_start: int = -1
    """first prompt token whose log-probability is wanted; -1: none"""
    top_logprobs: int = 0
    arrived: float = 0.0

    output: list[int] = field(default_factory=list)
    """tokens said before the last retraction; those since then are in the scheduler's tensors"""
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, first token it said)"""
    top: list[list[list[Any]]] = field(default_factory=list)
    input_logprobs: list[list[Any]] | None = None
    input_top: list[Any] = field(default_factory=list)
    cached: int = 0
    """prompt tokens whose keys and values were copied instead of computed"""
    retractions: int = 0

    @property
    def context(self) -> list[int]:
        """Prompt and what has been said before the last retraction."""
        return self.prompt + self.output


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model and an engine can take."""

    vocab: int
    max_context: int
    end_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A checked payload: one entry per answer."""

    rids: list[str]
    families: list[str]
    prompts: list[list[int]]
    samplings: list[Sampling]
    single: bool
    """True: the reply is one dict, not a list"""
    stream: bool
    return_logprob: list[bool]
    logprob_start: list[int]
    top_logprobs: list[int]


_TOP_KEYS = {
    "text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "stream",
}  # fmt: skip
_HARMLESS = {
    "log_metrics", "priority", "routing_key", "session_id", "background", "return_text_in_logprobs", "extra_key",
    "no_logs", "custom_labels", "return_entropy", "model",
}  # fmt: skip
"""keys of SGLang that change nothing in an answer of this engine"""
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 1e4),
    "top_p": (float, 0.0, 1.0),
    "min_p": (float, 0.0, 1.0),
    "top_k": (int, -1, 2**31),
    "frequency_penalty": (float, -2.0, 2.0),
    "presence_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 1e-6, 2.0),
    "max_new_tokens": (int, 0, 2**31),
    "min_new_tokens": (int, 0, 2**31),
    "sampling_seed": (int, -(2**63), 2**63 - 1),
    "n": (int, 1, 4096),
}
_OTHER = {
    "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "logit_bias",
    "spaces_between_special_tokens",
}  # fmt: skip
_DEFAULTS = Sampling(seed=0)


def parse_sampling(params: Any, end_ids: frozenset[int], vocab: int) -> tuple[Sampling, int]:
    """Sampling parameters and n. Unknown ones that ask for something are refused by name."""
    if not isinstance(params, Mapping):
        raise BadRequest(f"sampling_params must be an object, not {type(params).__name__}")
    values: dict[str, Any] = {}
    for key, value in params.items():
        if key in _NUMBERS:
            if value is not None:
                values[key] = _number(key, value)
        elif key == "custom_params":
            values["said_before"] = _said_before(value)
        elif key not in _OTHER and value not in (None, False, "", [], {}):
            known = [*_NUMBERS, *_OTHER]
            raise BadRequest(f"sampling parameter {key!r} is not known to this engine{nearest(key, known)}")
    count = values.pop("n", 1)
    seed = values.pop("sampling_seed", None)
    if values.get("top_p") == 0:
        raise BadRequest("sampling parameter top_p must be above 0")
    if values.get("top_k") == 0:
        raise BadRequest("sampling parameter top_k must be at least 1, or -1 for all tokens")
    ends = frozenset() if params.get("ignore_eos") else end_ids
    sampling = Sampling(
        seed=secrets.randbits(62) if seed is None else seed,
        stop=_strings(params.get("stop")),
        stop_ids=ends | _ids("stop_token_ids", params.get("stop_token_ids"), vocab),
        skip_special_tokens=bool(params.get("skip_special_tokens", True)),
        no_stop_trim=bool(params.get("no_stop_trim", False)),
        logit_bias=_bias(params.get("logit_bias"), vocab),
        penalised=any(values.get(k, d) != d for k, d in _PENALTIES.items()),
        cuts=values.get("top_k", -1) > 0 or values.get("top_p", 1) < 1 or values.get("min_p", 0) > 0,
        **values,
    )
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise BadRequest(
            f"min_new_tokens {sampling.min_new_tokens} is larger than max_new_tokens {sampling.max_new_tokens}"
        )
    return sampling, count


_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def _said_before(custom: Any) -> int:
    """The one custom parameter of this engine."""
    if custom is None:
        return 0
    said = custom.get("said_before", 0) if isinstance(custom, Mapping) else None
    if type(said) is not int or said < 0 or set(custom) - {"said_before"}:
        raise BadRequest(f"sampling parameter custom_params = {custom!r}: this engine takes said_before, a count")
    return said


def _number(key: str, value: Any) -> float | int:
    kind, low, high = _NUMBERS[key]
    good = isinstance(value, int | float) and not isinstance(value, bool) and (kind is float or value == int(value))
    if not good:
        raise BadRequest(f"sampling parameter {key} = {value!r} is not a{'n integer' if kind is int else ' number'}")
    if not low <= value <= high:
        raise BadRequest(f"sampling parameter {key} = {value!r} is outside [{low}, {high}]")
    return int(value) if kind is int else float(value)


def _strings(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else [] if value is None else value
    if isinstance(found, list | tuple) and len(found) > MOST_STOPS:
        raise BadRequest(f"sampling parameter stop has {len(found)} strings; at most {MOST_STOPS} are taken")
    if not isinstance(found, list | tuple) or not all(isinstance(s, str) for s in found):
        raise BadRequest(f"sampling parameter stop = {value!r} must be a string or a list of strings")
    return tuple(s for s in found if s)


def _ids(key: str, value: Any, vocab: int) -> frozenset[int]:
    if value is None:
        return frozenset()
    if isinstance(value, list) and len(value) > MOST_STOPS:
        raise BadRequest(f"{key} has {len(value)} tokens; at most {MOST_STOPS} are taken")
    if not isinstance(value, list | tuple | set) or not all(type(i) is int and 0 <= i < vocab for i in value):
        raise BadRequest(f"{key} = {value!r} must be a list of token ids in 0..{vocab - 1}")
    return frozenset(value)


def _bias(value: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    try:
        pairs = tuple((int(k), float(v)) for k, v in (value or {}).items())
    except (AttributeError, TypeError, ValueError):
        raise BadRequest(f"logit_bias = {value!r} must map token ids to numbers") from None
    if not all(0 <= k < vocab for k, _ in pairs):
        raise BadRequest(f"logit_bias names a token id outside 0..{vocab - 1}")
    if not all(abs(v) <= LARGEST_BIAS for _, v in pairs):
        raise BadRequest(f"logit_bias = {value!r} goes beyond {LARGEST_BIAS:g}")
    return pairs


class _Parsed:
    """Sampling parameters of a list, of which neighbours mostly differ in their seed alone."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._common: dict[str, Any] | None = None
        self._last = (_DEFAULTS, 1)

    def sampling(self, params: Any) -> tuple[Sampling, int]:
        """parse_sampling, or the last result with another seed."""
        seed = params.get("sampling_seed") if isinstance(params, dict) else None
        if type(seed) is not int:
            return parse_sampling(params, self._limits.end_ids, self._limits.vocab)
        common = {k: v for k, v in params.items() if k != "sampling_seed"}
        if common != self._common:
            self._last = parse_sampling(params, self._limits.end_ids, self._limits.vocab)
            self._common = common
        return replace(self._last[0], seed=int(_number("sampling_seed", seed))), self._last[1]


def parse_generate(payload: Mapping[str, Any], limits: Limits, encode: Callable[[str], list[int]]) -> Ask:
    """Check a `/generate` payload; raises BadRequest naming what is wrong."""
    if not isinstance(payload, Mapping):
        raise BadRequest(f"the payload must be an object, not {type(payload).__name__}")
    for key, value in payload.items():
        if key not in _TOP_KEYS and key not in _HARMLESS and value not in (None, False, "", [], {}):
            raise BadRequest(f"payload key {key!r} is not known to this engine{nearest(key, sorted(_TOP_KEYS))}")
    prompts, single = _prompts(payload, encode)
    count = len(prompts)
    params = payload.get("sampling_params")
    per_prompt = params if isinstance(params, list) else [params or {}] * count
    if len(per_prompt) != count:
        raise BadRequest(f"{len(per_prompt)} sampling_params for {count} prompts")
    rids = _rids(payload.get("rid"), count, single)
    ask = Ask(
        rids=[], families=[], prompts=[], samplings=[], single=single, stream=bool(payload.get("stream")),
        return_logprob=[], logprob_start=[], top_logprobs=[],
    )  # fmt: skip
    flags = _spread(payload, "return_logprob", False, count)
    starts = _spread(payload, "logprob_start_len", -1, count)
    tops = _spread(payload, "top_logprobs_num", 0, count)
    many = False
    parsed = _Parsed(limits)
    for i, prompt in enumerate(prompts):
        sampling, n = parsed.sampling(per_prompt[i] or {})
        check_length(prompt, sampling, limits, i)
        many |= n > 1
        ask.rids.extend([rids[i]] if n == 1 else [f"{rids[i]}_{j}" for j in range(n)])
        given = payload.get("rid")
        ask.families.extend([given if isinstance(given, str) else rids[i]] * n)
        ask.prompts.extend([prompt] * n)
        ask.samplings.extend(numbered(sampling, n))
        ask.return_logprob.extend([bool(flags[i])] * n)
        ask.logprob_start.extend([_start(starts[i], len(prompt)) if flags[i] else -1] * n)
        ask.top_logprobs.extend([_count("top_logprobs_num", tops[i]) if flags[i] else 0] * n)
    return Ask(**{**ask.__dict__, "single": single and not many})


def numbered(sampling: Sampling, n: int) -> list[Sampling]:
    """n samplings with a seed each; the first keeps the given one, so that n = 1 is its prefix."""
    return [sampling] + [replace(sampling, seed=(sampling.seed + j * 0x9E3779B1) % 2**62) for j in range(1, n)]


def _start(value: Any, length: int) -> int:
    if value is None or value == -1:
        return -1
    if type(value) is not int or not 0 <= value <= length:
        raise BadRequest(f"logprob_start_len = {value!r} is outside 0..{length}")
    return value


def _spread(payload: Mapping[str, Any], key: str, default: Any, count: int) -> list[Any]:
    value = payload.get(key)
    if isinstance(value, list):
        if len(value) != count:
            raise BadRequest(f"{len(value)} values of {key} for {count} prompts")
        return value
    return [default if value is None else value] * count


def _count(key: str, value: Any) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or value < 0:
        raise BadRequest(f"{key} = {value!r} is no count")
    return int(value)


def _rids(value: Any, count: int, single: bool) -> list[str]:
    if value is None:
        # one draw for all: the system's random numbers can cost 0.1 ms each
        first = uuid.uuid4().int
        return [f"{(first + i) % 2**128:032x}" for i in range(count)]
    if isinstance(value, str):
        return [value] if single else [f"{value}_{i}" for i in range(count)]
    if not isinstance(value, list) or len(value) != count or not all(isinstance(r, str) for r in value):
        raise BadRequest(f"rid must be a string or a list of {count} strings")
    return value


def _prompts(payload: Mapping[str, Any], encode: Callable[[str], list[int]]) -> tuple[list[list[int]], bool]:
    text, ids = payload.get("text"), payload.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("give either text or input_ids")
    if text is not None:
        single = isinstance(text, str)
        texts = [text] if single else text
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise BadRequest("text must be a string or a list of strings")
        return [encode(t) for t in texts], single
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids must be a list of token ids, or a list of such lists")
    single = not isinstance(ids[0], list)
    return ([ids] if single else ids), single


def check_length(prompt: Any, sampling: Sampling, limits: Limits, index: int) -> None:
    """Refuse what does not fit."""
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest(f"prompt {index} is empty or not a list of token ids")
    if any(type(i) is not int for i in prompt) or min(prompt) < 0 or max(prompt) >= limits.vocab:
        raise BadRequest(f"prompt {index} holds something that is no token id in 0..{limits.vocab - 1}")
    total = len(prompt) + sampling.max_new_tokens
    if total > limits.max_context:
        raise BadRequest(
            f"prompt {index} has {len(prompt)} tokens and asks for {sampling.max_new_tokens}: {total} tokens exceed "
            f"the engine's context of {limits.max_context}",
            "shorten the prompt, lower max_new_tokens, or raise engine.max_context",
        )

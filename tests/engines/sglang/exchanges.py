"""Requests as slime sends them, one by one; what SGLang answers is recorded in tests/golden/sglang.

SLIME_SGLANG_PYTHON=.venv-sglang/bin/python python -m tests.engines.sglang.exchanges      records anew
"""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "sglang"
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 4, "stop": [], "stop_token_ids": [2],
    "skip_special_tokens": True, "no_stop_trim": True, "sampling_seed": 2**62,
}  # fmt: skip
"""what slimecli.rollout.sampling sends"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0, "max_tokens": 4}

EXCHANGES: dict[str, tuple[str, str, Any]] = {
    "generate": ("POST", "/generate", {"input_ids": [5, 6, 7], "sampling_params": GREEDY, "return_logprob": True}),
    "generate_text": ("POST", "/generate", {"text": "What is 2 + 3?", "sampling_params": GREEDY}),
    "generate_rollout": (
        "POST",
        "/generate",
        {"input_ids": [[5, 6, 7]] * 2, "sampling_params": [SAMPLING] * 2, "return_logprob": True},
    ),
    "generate_n": ("POST", "/generate", {"input_ids": [5, 6, 7], "sampling_params": {**GREEDY, "n": 2}}),
    "generate_input_logprobs": (
        "POST",
        "/generate",
        {
            "input_ids": [5, 60, 7],
            "sampling_params": GREEDY,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
    ),
    "generate_stop_token": (
        "POST",
        "/generate",
        {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "stop_token_ids": list(range(3, 300))}},
    ),
    "generate_stop_string": (
        "POST",
        "/generate",
        {
            "text": "What",
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "stop": ["\u0001"], "no_stop_trim": True},
            "return_logprob": True,
        },
    ),
    "generate_bad_value": ("POST", "/generate", {"input_ids": [5], "sampling_params": {"temperature": -1}}),
    "generate_too_long": ("POST", "/generate", {"input_ids": [5] * 600, "sampling_params": {"max_new_tokens": 4}}),
    "chat": ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "completion": ("POST", "/v1/completions", {"model": "m", "prompt": "What", "temperature": 0, "max_tokens": 4}),
    "models": ("GET", "/v1/models", None),
    "model_info": ("GET", "/model_info", None),
    "server_info": ("GET", "/server_info", None),
    "health": ("GET", "/health", None),
    "health_generate": ("GET", "/health_generate", None),
    "abort_all": ("POST", "/abort_request", {"abort_all": True}),
    "abort_one": ("POST", "/abort_request", {"rid": "nobody"}),
    "pause": ("POST", "/pause_generation", {"mode": "retract"}),
    "continue": ("POST", "/continue_generation", {}),
    "flush": ("POST", "/flush_cache", {}),
    "begin": ("POST", "/begin_weight_update", {}),
    "end": ("POST", "/end_weight_update", {}),
    "end_without_begin": ("POST", "/end_weight_update", {}),
    "update_no_such_folder": ("POST", "/update_weights_from_disk", {"model_path": "/none"}),
    "update": ("POST", "/update_weights_from_disk", {"model_path": "MODEL", "weight_version": "3"}),
    "update_outside_begin": (
        "POST",
        "/update_weights_from_distributed",
        {"names": [], "dtypes": [], "shapes": [], "group_name": "x"},
    ),
    "release": ("POST", "/release_memory_occupation", {"tags": ["kv_cache"]}),
    "resume": ("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]}),
    "no_such_path": ("GET", "/no_such_path", None),
}
"""name -> (method, path, payload); MODEL stands for the model's folder"""
LONG = ("server_info", "model_info")
"""replies of hundreds of keys, of which those are kept that slime reads"""
READ = (
    "version",
    "max_total_num_tokens",
    "tp_size",
    "dtype",
    "device",
    "weight_version",
    "model_path",
    "is_generation",
)


def exchange(url: str, method: str, path: str, payload: Any) -> dict[str, Any]:
    """{"status", "body"} of one call; the body is text where it is no JSON."""
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url + path, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    try:
        body = json.loads(raw) if raw else None
    except json.JSONDecodeError:
        body = raw.decode()
    return {"status": status, "body": body}


def play(url: str, model: Path) -> dict[str, dict[str, Any]]:
    """Name -> what a server answers, all exchanges in order."""
    out = {}
    for name, (method, path, payload) in EXCHANGES.items():
        if isinstance(payload, dict) and payload.get("model_path") == "MODEL":
            payload = {**payload, "model_path": str(model)}
        out[name] = exchange(url, method, path, payload)
        if name in LONG:
            out[name]["body"] = {k: v for k, v in out[name]["body"].items() if k in READ}
    return out


def recorded() -> dict[str, dict[str, Any]]:
    """Name -> what SGLang answered when it was recorded."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(GOLDEN.glob("*.json"))}


def main() -> None:
    """Start a server on the tests' tiny model and write its answers."""
    from slimecli import env
    from slimecli.engines.sglang.launch import start_server
    from slimecli.recipe import load_recipe
    from tests.engines.sglang.made import overrides
    from tests.models import tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model(Path(scratch) / "model", "qwen3")
        recipe = load_recipe("", overrides(env.sglang_python()))
        server = start_server(recipe, model, log=Path(scratch) / "server.log")
        try:
            answers = play(server.url, model)
        finally:
            server.close()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, answer in answers.items():
        text = json.dumps(answer, indent=1, sort_keys=True).replace(str(model), "MODEL")
        (GOLDEN / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

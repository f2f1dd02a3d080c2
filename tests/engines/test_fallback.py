"""Architectures without an own decoder, through the same scheduler."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, OlmoConfig, PhiConfig

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.engines.embedded.fallback import AnyDecoder
from slimecli.errors import SlimeError
from slimecli.files import read_json, write_json
from slimecli.protocols import WeightUpdate
from slimecli.weights.fingerprint import fingerprint
from tests.models import tiny_tokenizer

COMMON = {"vocab_size": 300, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
LLAMA_LIKE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2, **COMMON),
    "phi": PhiConfig(max_position_embeddings=128, initializer_range=0.2, **LLAMA_LIKE, **COMMON),
    "olmo": OlmoConfig(max_position_embeddings=128, num_key_value_heads=2, **LLAMA_LIKE, **COMMON),
}
PROMPTS = [[5], [9, 8, 7], list(range(20, 60)), [9, 8, 7]]


def save(folder, name, seed):
    torch.manual_seed(seed)
    folder.mkdir()
    tiny_tokenizer(folder)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", list(CONFIGS))
def test_equal_to_transformers_and_takes_weights(tmp_path, name):
    folders = [save(tmp_path / f"m{seed}", name, seed) for seed in (0, 1)]
    engine = EmbeddedEngine(folders[0], slots=3, max_context=96)
    assert isinstance(engine.model, AnyDecoder)
    for version, folder in enumerate(folders):
        if version:
            tensors = load_file(folder / "model.safetensors")
            update = WeightUpdate(kind="in_process", version=version, tensors=tensors)
            assert asyncio.run(engine.update_weights(update)).fingerprint == fingerprint(tensors.items())
        reference = AutoModelForCausalLM.from_pretrained(folder)
        payload = {
            "input_ids": PROMPTS,
            "sampling_params": {"temperature": 0, "max_new_tokens": 10},
            "return_logprob": True,
        }
        for prompt, reply in zip(PROMPTS, asyncio.run(engine.generate(payload)), strict=True):
            expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10)[0, len(prompt) :]
            assert reply["output_ids"] == expected.tolist()
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + reply["output_ids"]])).logits[0]
            said = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, expected[:, None])[:, 0]
            given = torch.tensor([p for p, _, _ in reply["meta_info"]["output_token_logprobs"]])
            torch.testing.assert_close(given, said, rtol=0, atol=1e-5)
    asyncio.run(engine.sleep())
    assert engine.info()["weight_bytes"] == 0
    asyncio.run(engine.close())


def test_memory_it_does_not_know_is_refused(tmp_path):
    folder = save(tmp_path / "m", "olmo", 0)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(SlimeError, match="linear_attention"):
        EmbeddedEngine(folder, slots=2, max_context=64)


def test_scheduling_is_the_same_as_with_the_own_decoder(tmp_path):
    """Input log-probs, streaming, an update in mid-flight, sleep and wake."""
    old, new = (save(tmp_path / str(seed), "gpt2", seed) for seed in (0, 1))
    engine = EmbeddedEngine(old, slots=4, max_context=128)
    prompt = [5, 60, 7, 80]

    def log_probs(folder, ids):
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
        return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

    async def scene():
        params = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 0}
        asked = await engine.generate(
            {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        )
        parts = [part async for part in engine.stream({"input_ids": prompt, "sampling_params": params})]
        assert [p["output_ids"] for p in parts] == [asked["output_ids"][:1], asked["output_ids"]]
        long = {"max_new_tokens": 100, "ignore_eos": True, "sampling_seed": 1}
        task = asyncio.create_task(
            engine.generate({"input_ids": [3, 4], "sampling_params": long, "return_logprob": True})
        )
        while engine.info()["generated_tokens"] < 8:
            await asyncio.sleep(0.001)
        await engine.update_weights(WeightUpdate(kind="disk", version=2, folder=new, in_flight=True))
        moved = await task
        await engine.sleep()
        assert engine.info()["weight_bytes"] == engine.info()["kv_cache_bytes"] == 0
        await engine.wake()
        await engine.update_weights(WeightUpdate(kind="disk", version=3, folder=old))
        again = await engine.generate({"input_ids": prompt, "sampling_params": params})
        assert again["output_ids"] == asked["output_ids"]
        return asked["meta_info"], moved

    asked, moved = asyncio.run(scene())
    given = torch.tensor([p for p, _, _ in asked["input_token_logprobs"][1:]])
    torch.testing.assert_close(given, log_probs(old, prompt), rtol=0, atol=1e-5)
    spans = moved["meta_info"]["weight_versions"]
    cut = spans[0]["end"]
    assert [s["version"] for s in spans] == ["0", "2"] and 0 < cut < 100
    given = torch.tensor([p for p, _, _ in moved["meta_info"]["output_token_logprobs"]])
    ids = [3, 4, *moved["output_ids"]]
    torch.testing.assert_close(given[cut:], log_probs(new, ids)[1 + cut :], rtol=0, atol=1e-5)
    torch.testing.assert_close(given[:cut], log_probs(old, ids)[1 : 1 + cut], rtol=0, atol=1e-5)
    asyncio.run(engine.close())

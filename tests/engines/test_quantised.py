"""The embedded engine takes an fp8 folder for the model it holds."""

import asyncio

import pytest

from slimecli.engines.embedded.engine import EmbeddedEngine
from slimecli.errors import SlimeError
from slimecli.weights.export import export_weights
from slimecli.weights.origin import hf_origin


def answers(folder):
    engine = EmbeddedEngine(folder, slots=4, max_context=64, dtype="float32")
    payload = {
        "input_ids": [[5, 9, 20], [7, 8, 1, 4]],
        "sampling_params": {"temperature": 0, "max_new_tokens": 12},
        "return_logprob": True,
    }
    replies = asyncio.run(engine.generate(payload))
    asyncio.run(engine.close())
    return [(r["output_ids"], [x[0] for x in r["meta_info"]["output_token_logprobs"]]) for r in replies]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_fp8_answers_as_its_dequantised_copy(family, models, tmp_path):
    for source, out, quantize in ((models(family), "q", "fp8"), (tmp_path / "q", "plain", "")):
        export_weights(hf_origin(source), tmp_path / out, quantize=quantize, card=lambda notes: "")
    assert answers(tmp_path / "q") == answers(tmp_path / "plain")
    assert answers(tmp_path / "q") != answers(models(family))


def test_a_family_without_a_layout_says_how_to_dequantise(models, tmp_path):
    export_weights(hf_origin(models("qwen3_moe")), tmp_path / "q", quantize="fp8", card=lambda notes: "")
    with pytest.raises(SlimeError) as caught:
        EmbeddedEngine(tmp_path / "q", slots=4, max_context=64)
    assert caught.value.fix.startswith(f"slime export --from {tmp_path / 'q'}")

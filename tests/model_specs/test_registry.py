import dataclasses

import pytest

from slimecli.errors import DataError, UsageError
from slimecli.model_specs import from_config, get_spec, registry


@pytest.mark.parametrize("name", registry())
def test_config_round_trip(name):
    spec = get_spec(name)
    assert spec.check(spec.to_config()) == []
    again = from_config(spec.to_config(), name=name)
    kept = {"repo": spec.repo, "revision": spec.revision, "source": spec.source, "note": spec.note}
    assert dataclasses.replace(again, **kept) == spec
    assert spec.source


def test_traps():
    assert get_spec("qwen2.5-1.5b").rope_theta == 1e6
    assert get_spec("qwen2.5-math-1.5b").rope_theta == 1e4
    assert (get_spec("qwen2.5-32b").eps, get_spec("qwen2.5-32b-instruct").eps) == (1e-5, 1e-6)
    assert get_spec("qwen3-4b-instruct-2507").rope_theta == 5e6
    assert (get_spec("glm-4-32b-0414").layers, get_spec("glm-z1-32b-0414").kv_heads) == (61, 2)
    assert get_spec("glm-4-9b-0414").qkv_bias and not get_spec("glm-4-32b-0414").qkv_bias
    assert (get_spec("kimi-k2-instruct").eps, get_spec("kimi-k2-thinking").eps) == (1e-6, 1e-5)
    assert (get_spec("mixtral-8x22b").vocab, get_spec("mixtral-8x22b-instruct").vocab) == (32000, 32768)
    assert (get_spec("glm-5").rope_theta, get_spec("glm-5.2").rope_theta) == (1e6, 8e6)


TABLE = """
    qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b qwen2.5-32b
    qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-4b-instruct-2507 qwen3-8b qwen3-14b qwen3-32b
    qwen3-30b-a3b qwen3-30b-a3b-instruct-2507 qwen3-235b-a22b qwen3-235b-a22b-thinking-2507
    qwen3-next-80b-a3b-instruct qwen3.5-0.8b qwen3.5-4b qwen3.5-9b qwen3.5-27b qwen3.5-35b-a3b qwen3.6-35b-a3b
    llama3-8b llama3-70b llama3.1-8b-instruct llama3.1-70b-instruct llama3.2-3b-instruct
    glm-4-9b-0414 glm-4-32b-0414 glm-z1-9b-0414 glm-z1-32b-0414 glm-4.5-air glm-4.5 glm-4.6 glm-4.7 glm-4.7-flash
    glm-5 glm-5.2 deepseek-v3 deepseek-v3.1 deepseek-r1 kimi-k2-instruct kimi-k2-thinking
    moonlight-16b-a3b moonlight-16b-a3b-instruct mimo-7b-rl minimax-m2 minimax-m2.5
    mixtral-8x7b mixtral-8x22b qwen1.5-moe-a2.7b qwen2-57b-a14b
"""


def test_every_model_of_the_mission_is_there():
    missing = set(TABLE.split()) - set(registry())
    assert not missing
    without = [name for name, spec in registry().items() if not spec.repo and "no published weights" not in spec.note]
    assert not without
    repos = [spec.repo for spec in registry().values() if spec.repo]
    assert len(repos) == len(set(repos))
    assert not [name for name, spec in registry().items() if not spec.source], "numbers say where they were read"


def test_names():
    assert get_spec("Qwen/Qwen3-4B") is get_spec("qwen3-4b")
    with pytest.raises(UsageError, match="did you mean 'qwen3-8b'"):
        get_spec("qwen3-88b")
    with pytest.raises(DataError, match="did you mean 'qwen3'"):
        from_config({"model_type": "qwen33"})
    with pytest.raises(DataError, match="hidden_size, vocab_size"):
        from_config(
            {k: v for k, v in get_spec("qwen3-4b").to_config().items() if k not in ("hidden_size", "vocab_size")}
        )

"""The kernel that packed samples go through on a GPU, in place of Transformer Engine's: asked rightly, and only of a
torch that has it."""

from __future__ import annotations

import inspect
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode

from slimecli.trainers import _attention
from slimecli.trainers.megatron.core_attention import CoreAttention

BOUNDS = [0, 5, 6, 13]


class OnGpu(TorchFunctionMode):
    """Every tensor says that it is on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func == torch.Tensor.is_cuda.__get__ else func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def asked_anew():
    """What torch has is asked once per process."""
    _attention.has_flash.cache_clear()
    yield
    _attention.has_flash.cache_clear()


def packed() -> Any:
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    return SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=7, max_seqlen_kv=7)


def attention() -> tuple[CoreAttention, list[torch.Tensor]]:
    torch.manual_seed(0)
    tensors = [torch.randn(BOUNDS[-1], heads, 8).bfloat16() for heads in (4, 2, 2)]
    return CoreAttention(SimpleNamespace(context_parallel_size=1)), tensors


def test_the_kernel_is_asked_as_torch_defines_it(monkeypatch):
    signature, asked = inspect.signature(varlen.varlen_attn), []

    def kernel(*args: Any, **options: Any) -> torch.Tensor:
        found = signature.bind(*args, **options).arguments
        asked.append(found["window_size"])
        answers = []
        for a, b in pairwise(found["cu_seq_q"].tolist()):
            assert b - a <= found["max_q"]
            one = [found[name][a:b].transpose(0, 1)[None] for name in ("query", "key", "value")]
            causal = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=found["enable_gqa"])
            answers.append(causal[0].transpose(0, 1))
        return torch.cat(answers)

    kernel.__signature__ = signature  # type: ignore[attr-defined]
    module, tensors = attention()
    expected = module(*tensors, packed_seq_params=packed())
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    with OnGpu():
        found = module(*tensors, packed_seq_params=packed())
    assert asked == [(-1, 0)]
    assert torch.equal(found, expected)


def test_a_torch_whose_kernel_knows_no_grouped_queries_attends_without_it(monkeypatch):
    """As torch's was between 2.10 and 2.12."""

    def kernel(query: Any, key: Any, value: Any, *bounds: Any, scale: Any = None, window_size: Any = (-1, -1)) -> None:
        raise AssertionError("it takes no enable_gqa")

    module, tensors = attention()
    expected = module(*tensors, packed_seq_params=packed())
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    with OnGpu():
        assert torch.equal(module(*tensors, packed_seq_params=packed()), expected)

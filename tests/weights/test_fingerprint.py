import pytest
import torch

from slimecli.errors import SlimeError
from slimecli.weights import fingerprint as module
from slimecli.weights.fingerprint import fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool)


def made(dtype=torch.float32, count=3 * module.ROW + 17):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 2**15, (count,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5, module.ROW, module.ROW + 1, 2 * module.ROW + 3])
def test_every_single_bit_counts(dtype, count):
    base = made(dtype, count)
    before = fingerprint([("a", base)])
    octets = base.clone().view(torch.uint8)
    for position in {0, octets.numel() // 2, octets.numel() - 1}:
        for bit in (0, 7):
            octets[position] ^= 1 << bit
            assert fingerprint([("a", octets.view(dtype))]) != before
            octets[position] ^= 1 << bit
    assert fingerprint([("a", octets.view(dtype))]) == before


def test_swapped_elements_and_sign_bits_count():
    base = made()
    for i, j in [(0, 1), (0, 2), (5, module.ROW + 5), (3, 2 * module.ROW)]:
        other = base.clone()
        other[i], other[j] = base[j], base[i]
        assert fingerprint([("a", other)]) != fingerprint([("a", base)])
    signs = torch.ones(8)
    left, right = signs.clone(), signs.clone()
    left[0], right[1] = -1, -1
    assert fingerprint([("a", left)]) != fingerprint([("a", right)])


def test_names_shapes_dtypes_and_equal_shaped_swaps_count():
    a, b = made(count=12), made(count=12) + 1
    base = fingerprint([("a", a), ("b", b)])
    assert fingerprint([("b", b), ("a", a)]) == base
    assert fingerprint([("a", b), ("b", a)]) != base
    assert fingerprint([("a", a.view(3, 4)), ("b", b)]) != base
    assert fingerprint([("a", a.view(torch.int32)), ("b", b)]) != base
    assert fingerprint([("a", a)]) != base
    zeros = torch.zeros(4)
    assert fingerprint([("a", zeros)]) != fingerprint([("a", torch.zeros(5))])


def test_layout_in_memory_does_not_count():
    table = made(count=12).view(3, 4)
    assert fingerprint([("a", table.t())]) == fingerprint([("a", table.t().contiguous())])
    assert fingerprint([("a", table[1:])]) == fingerprint([("a", table[1:].clone())])
    assert fingerprint([("a", torch.zeros(0, 3))]) != fingerprint([("a", torch.zeros(3, 0))])


def test_is_the_same_in_every_process():
    assert fingerprint([("a", torch.arange(10, dtype=torch.float32))]) == "f2d0424bbe34b8d5001449f45cdf1738"


def test_a_name_given_twice_is_refused():
    with pytest.raises(SlimeError, match="twice"):
        fingerprint([("a", torch.zeros(1)), ("a", torch.zeros(1))])

"""Changes of one version of the weights: bit for bit, and nothing is believed."""

import json

import pytest
import torch

from slimecli import files
from slimecli.sync import delta
from slimecli.weights.fingerprint import fingerprint

NAN, NEGATIVE_ZERO = float("nan"), -0.0


def bits(tensor):
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def after_step(old, share, size=1e-3):
    """As an optimizer step leaves it: a share of the elements a little off."""
    moved = torch.rand(old.shape) < share
    new = old.clone()
    new[moved] = (new[moved].float() * (1 + size)).to(old.dtype)
    return new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.001, 0.2, 1.0])
def test_what_comes_out_is_what_went_in(dtype, share):
    torch.manual_seed(0)
    old = torch.randn(70, 33).to(dtype)
    new = after_step(old, share, 0.1)
    encoding, count, raw = delta.encode(old, new)
    assert encoding == ("xor" if share == 1.0 else "sparse")
    assert count == int((bits(old) != bits(new)).sum()) > 0
    out = delta.decode(raw, {"encoding": encoding, "count": count}, old)
    assert torch.equal(bits(out), bits(new)) and out.shape == new.shape and out.dtype == dtype


def test_bits_are_compared_not_values():
    old = torch.tensor([0.0, NAN, 1.0, 2.0])
    assert delta.encode(old, old.clone())[1] == 0, "NaN is itself"
    new = torch.tensor([NEGATIVE_ZERO, NAN, 1.0, 2.0])
    encoding, count, raw = delta.encode(old, new)
    assert count == 1
    assert torch.equal(bits(delta.decode(raw, {"encoding": encoding, "count": count}, old)), bits(new))


def test_a_few_changes_take_a_few_bytes(tmp_path):
    torch.manual_seed(0)
    old = {"a": torch.randn(1000, 100).bfloat16(), "b": torch.randn(1000, 100).bfloat16(), "c": torch.zeros(0)}
    new = {"a": after_step(old["a"], 0.01, 0.05), "b": old["b"], "c": old["c"]}
    told = delta.write(new.items(), old, tmp_path, {"version": 1, "fingerprint": "f"})
    assert list(told["tensors"]) == ["a"], "what did not change is not there"
    assert told["elements"] == 200_000 and 500 < told["changed"] < 1100
    assert (tmp_path / "delta.bin").stat().st_size == told["bytes"] < 0.02 * old["a"].nbytes * 2


@pytest.fixture
def written(tmp_path):
    """A folder of changes, and what they are between."""
    torch.manual_seed(1)
    old = {"one.weight": torch.randn(40, 9), "two.weight": torch.randn(50)}
    new = {name: after_step(t, 0.3) for name, t in old.items()}
    about = {"version": 4, "base_version": 3, "fingerprint": fingerprint(new.items())}
    delta.write(new.items(), old, tmp_path, about | {"base_fingerprint": fingerprint(old.items())})
    return tmp_path, old, new


def test_applied_changes_are_the_new_weights(written):
    folder, old, new = written
    changes = delta.Delta(folder)
    changes.check_base(fingerprint(old.items()))
    assert {n: changes.applied(n, old[n]).tolist() for n in changes.tensors} == {n: t.tolist() for n, t in new.items()}


def test_changes_on_other_weights_are_refused(written):
    folder, old, new = written
    changes = delta.Delta(folder)
    with pytest.raises(delta.DeltaRefused, match="applied already"):
        changes.check_base(fingerprint(new.items()))
    with pytest.raises(delta.DeltaRefused, match=r"from version 3 .*; held are weights with 0123"):
        changes.check_base("0123")
    other = {**old, "two.weight": old["two.weight"] + 1}
    with pytest.raises(delta.DeltaRefused, match=r"two\.weight does not come out as it was sent"):
        changes.applied("two.weight", other["two.weight"])
    with pytest.raises(delta.DeltaRefused, match=r"two\.weight is .*\[49\]"):
        changes.applied("two.weight", torch.zeros(49))


def test_damage_is_named(written):
    folder, old, _ = written
    path, told = folder / "delta.bin", files.read_json(folder / "delta.json")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(delta.DeltaRefused, match=f"cut short: {len(whole) - 1} of {len(whole)} bytes"):
        delta.Delta(folder)
    place = told["tensors"]["two.weight"]["offset"] + told["tensors"]["two.weight"]["nbytes"] // 2
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert torch.is_tensor(delta.Delta(folder).applied("one.weight", old["one.weight"]))
    with pytest.raises(delta.DeltaRefused, match=r"two\.weight"):
        delta.Delta(folder).applied("two.weight", old["two.weight"])
    for text, reason in (
        ("{}", "holds no changes"),
        (json.dumps({**told, "format": 9}), "format 9"),
        (json.dumps({k: v for k, v in told.items() if k != "format"}), "format None"),
    ):
        (folder / "delta.json").write_text(text)
        with pytest.raises(delta.DeltaRefused, match=reason):
            delta.Delta(folder)

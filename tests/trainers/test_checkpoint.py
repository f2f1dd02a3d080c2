"""The checkpoint format, without a model."""

from __future__ import annotations

import pytest
import torch

from slimecli.errors import DataError
from slimecli.trainers._checkpoint import load_state, save_state


def test_a_plain_tensor_is_loaded_whole_on_every_rank(tmp_path):
    stored = {"weight/buffer": torch.arange(5.0), "weight/matrix": torch.randn(3, 2)}
    save_state(tmp_path, stored, step=7, rank=0, world=1)
    for rank in (0, 1):
        loaded = {name: torch.zeros_like(t) for name, t in stored.items()}
        assert load_state(tmp_path, loaded, rank=rank, world=2) == 7
        assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_another_shape_is_an_error(tmp_path):
    save_state(tmp_path, {"weight/x": torch.zeros(3, 2)}, step=1, rank=0, world=1)
    with pytest.raises(DataError, match=r"weight/x has shape \[3, 2\], the model's is \[2, 2\]"):
        load_state(tmp_path, {"weight/x": torch.zeros(2, 2)}, rank=0, world=1)


def test_no_pickle_is_read_or_written(tmp_path):
    save_state(tmp_path, {"weight/x": torch.zeros(3)}, step=1, rank=0, world=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank_00000.safetensors", "state.json"]

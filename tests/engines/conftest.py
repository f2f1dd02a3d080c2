"""Models and engines shared by the engine tests."""

from __future__ import annotations

import pytest

from tests.models import tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Family -> folder of a tiny model, made once."""
    root = tmp_path_factory.mktemp("models")
    made = {}

    def get(family, seed=0, **changes):
        key = (family, seed, *sorted(changes.items()))
        if key not in made:
            made[key] = tiny_model(root / str(len(made)), family, seed=seed, **changes)
        return made[key]

    return get

"""Tiny models that several files look at."""

import pytest

from tests.models import as_on_the_hub, tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """(family, form) -> tiny bfloat16 model, made once."""
    made = {}

    def make(family, form="hub"):
        if (family, form) not in made:
            path = tiny_model(tmp_path_factory.mktemp("model"), family, dtype="bfloat16")
            made[family, form] = as_on_the_hub(path, family) if form == "hub" else path
        return made[family, form]

    return make

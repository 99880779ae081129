"""Numbers in config.json that no model has: refused at once, instead of building layers until memory ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from infer.errors import ModelError
from infer.layers.facts import Facts


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 2**40), ("hidden_size", 10**30)])
def test_an_endless_model_is_refused(key: str, value: int) -> None:
    facts = Facts(cast(Any, SimpleNamespace(raw={key: value}, architecture="X", path="m", max_position=64)))
    with pytest.raises(ModelError, match=key):
        facts.integer(key)

from __future__ import annotations

from collections.abc import Iterator

import pytest
from float64 import Float64Throughout
from tiny_models import KINDS

from malmen.lm.model import LanguageModel, load_lm


@pytest.fixture
def exact() -> Iterator[None]:
    """Models compute in float64 throughout."""
    with Float64Throughout():
        yield


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of language model in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def lm() -> LanguageModel:
    """The built-in language model, for all tests together: it is frozen, and who changes it loads another."""
    return load_lm("builtin")

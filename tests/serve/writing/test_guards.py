"""Guards: what they measure is what the model does, and each limit has its reason."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from endpoints import make_bench, world_facts

from malmen.evaluate import predict_tokens, shift_ratio
from malmen.lm.model import fact_encoder
from malmen.lm.overlay import edited
from malmen.serve.settings import GuardConfig
from malmen.serve.writing.guards import Guards, Measured

FACTS = world_facts(12)


@pytest.fixture(scope="module")
def guards(tmp_path_factory: pytest.TempPathFactory) -> Guards:
    bench = make_bench(tmp_path_factory.mktemp("bench"))
    config = GuardConfig(max_shift_ratio=0.5, max_perplexity_ratio=1.5)
    return Guards(bench.lm, config, FACTS[6:], 4096, bench.editor.config.data)


def test_the_unedited_model_is_measured_as_itself(guards: Guards) -> None:
    measured = guards.measure({}, [])
    assert measured == Measured(True, 0.0, 1.0, []) and guards.reasons(measured) == []


def test_an_edit_is_measured_under_the_shifts_and_the_model_stays_as_it_was(guards: Guards, tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    shifts = bench.editor.edit(bench.lm, FACTS[:3]).shifts
    encoder = fact_encoder(bench.lm, bench.editor.config.data)
    facts = [encoder.encode(fact) for fact in FACTS[:3]]
    measured = guards.measure(shifts, facts)
    with edited(bench.lm, shifts):
        assert measured.predicted == predict_tokens(bench.lm, facts, 4096)
    assert measured.predicted != predict_tokens(bench.lm, facts, 4096)
    assert measured.max_shift_ratio == max(shift_ratio(bench.lm, shifts).values()) > 0
    assert measured.perplexity_ratio is not None and measured.perplexity_ratio != 1
    assert guards.measure({}, []) == Measured(True, 0.0, 1.0, [])


def test_shifts_that_are_not_finite_are_never_laid_over_the_model(guards: Guards) -> None:
    measured = guards.measure({"no layer of this name": torch.tensor([[math.nan]])}, [])
    assert not measured.finite and guards.reasons(measured) == ["the shift holds values that are not finite"]
    assert measured.report() == {"max_shift_ratio": None, "perplexity_ratio": None}


@pytest.mark.parametrize(
    ("measured", "reasons"),
    [
        (Measured(True, 0.5, 1.5, []), []),
        (Measured(True, 0.5, None, []), []),
        (Measured(True, 0.6, 1.0, []), ["guard.max_shift_ratio"]),
        (Measured(True, 0.1, 1.6, []), ["guard.max_perplexity_ratio"]),
        (Measured(True, 0.6, math.nan, []), ["guard.max_shift_ratio", "guard.max_perplexity_ratio"]),
    ],
)
def test_each_limit_that_is_passed_is_a_reason(guards: Guards, measured: Measured, reasons: list[str]) -> None:
    given = guards.reasons(measured)
    assert len(given) == len(reasons) and all(name in reason for name, reason in zip(reasons, given, strict=True))

"""UltraEdit's update against a derivation in numpy."""

from __future__ import annotations

import numpy
import pytest
import torch
from plain import plain_traces
from torch.testing import assert_close
from untouched import count_hooks, digest
from worded_models import DECODERS, worded_lm

from malmen.config import Config
from malmen.data.world import world_records
from malmen.errors import EditError
from malmen.lm.model import fact_encoder
from malmen.methods.ultraedit import UltraEdit

FACTS = [record.edit for record in world_records("validation")[:12]]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("tokens", ["answer", "all"])
def test_the_shift_is_least_squares_of_normalised_gradients(name: str, tokens: str) -> None:
    settings = {"layers": "last:2", "tokens": tokens, "edit_lr": 0.3, "damping": 0.7}
    config = Config.model_validate({"baselines": {"ultraedit": settings}, "data": {"append_eos": False}})
    lm = worded_lm(name)
    before = digest(lm), count_hooks(lm)
    method = UltraEdit(lm, config)
    found = method.edit(lm, FACTS)
    assert (digest(lm), count_hooks(lm)) == before
    encoder = fact_encoder(lm, config.data)
    traces = plain_traces(lm, method.layers, [encoder.encode(fact) for fact in FACTS], tokens)
    residuals = []
    for layer, shift in found.shifts.items():
        keys, grads = (part.numpy() for part in traces[layer])
        scaled = [(rows - rows.mean(0)) / rows.std(0) for rows in (keys, grads)]
        diffs = -0.3 * (scaled[0] ** 2).sum(1, keepdims=True) * scaled[1]
        wanted = numpy.linalg.solve(keys.T @ keys + 0.7 * numpy.eye(keys.shape[1]), keys.T @ diffs).T
        assert_close(shift, torch.from_numpy(wanted), rtol=1e-8, atol=1e-10)
        residuals.append(numpy.linalg.norm(keys @ wanted.T - diffs, axis=1) / numpy.linalg.norm(diffs, axis=1))
    assert found.mean_residual() == pytest.approx(numpy.concatenate(residuals).mean(), rel=1e-8)


def test_the_statistics_of_earlier_rounds_go_on_where_they_are_given() -> None:
    lm, config = worded_lm("gpt2"), Config.model_validate({"baselines": {"ultraedit": {"layers": "last:1"}}})
    method = UltraEdit(lm, config)
    series = method.for_rounds()
    series.edit(lm, FACTS[:3])
    later = series.edit(lm, FACTS[3:])
    assert series.seen is not None and method.seen is None
    (norm,) = series.seen.values()
    alone, together = method.for_rounds(), method.edit(lm, FACTS[3:])
    alone.edit(lm, FACTS)
    assert alone.seen is not None
    (whole,) = alone.seen.values()
    assert_close(norm.mean, whole.mean)
    assert_close(norm.deviation(), whole.deviation())
    (name,) = later.shifts
    assert not torch.allclose(later.shifts[name], together.shifts[name])


def test_one_token_alone_is_a_clear_error_because_it_would_do_nothing() -> None:
    lm, config = worded_lm("gpt2"), Config.model_validate({"baselines": {"ultraedit": {"layers": "last:1"}}})
    one = next(fact for fact in FACTS if len(fact_encoder(lm, config.data).encode(fact).targets) == 1)
    with pytest.raises(EditError, match="give more facts"):
        UltraEdit(lm, config).edit(lm, [one])

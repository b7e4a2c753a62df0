"""The LM's side of a step: what it takes from the cache equals what it computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, Setup, make_setup, random_facts, tiny_lm
from torch import Tensor
from torch.testing import assert_close

from malmen.data.tokens import EncodedFact, MetaBatch, TokenBatch
from malmen.lm_side import LMSide, MetaLosses
from malmen.runs.fact_cache import FactCache


class _Side(LMSide):
    """It knows how many facts it has run."""

    facts_run = 0

    def cut(self, facts: Sequence[EncodedFact]) -> list[TokenBatch]:
        self.facts_run += len(facts)
        return super().cut(facts)


def _side(setup: Setup, budget: int, cache: FactCache | None, tokens: str = "answer") -> _Side:
    config = setup.editor.config.model_copy(
        update={
            "batch": setup.editor.config.batch.model_copy(update={"token_budget": budget}),
            "editor": setup.editor.config.editor.model_copy(update={"tokens": tokens}),
        }
    )
    caches = dict.fromkeys(("edits", "equivalents", "unrelated"), cache) if cache else {}
    return _Side(setup.lm, setup.editor.layers, config, caches)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("rule", ["last:2", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_from_the_cache_equal_those_without(name: str, rule: str) -> None:
    setup = make_setup(name, layers=rule)
    lm, layers = setup.lm, setup.editor.layers
    facts = random_facts(lm, 14)
    batch = MetaBatch((), facts[:7], facts[7:])
    torch.manual_seed(3)
    shifts = {layer.name: torch.randn(layer.value_size, layer.key_size, dtype=torch.float64) for layer in layers}

    def run(budget: int, cache: FactCache | None) -> tuple[MetaLosses, dict[str, Tensor]]:
        return _side(setup, budget, cache).meta_backward(0, batch, shifts)

    expected = run(20, None)
    cache = FactCache(10**6)
    for budget in (20, 35, 1000):  # fills the cache, then uses it in batches of another size
        assert_close(run(budget, cache), expected, rtol=1e-9, atol=1e-11)
    if lm.kind != "encoder-decoder" and rule != "all":
        assert cache.hits == 2 * len(facts)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["gpt2", "gptj", "bert"])  # blocks that put out a tensor, a tuple, and a classifier's
def test_a_process_that_finds_the_shared_folder_full_gets_the_same_gradients(name: str, tmp_path: Path) -> None:
    setup = make_setup(name)
    layers, facts = setup.editor.layers, random_facts(setup.lm, 8)
    batch = MetaBatch((), facts[:4], facts[4:])
    torch.manual_seed(3)
    shifts = {layer.name: torch.randn(layer.value_size, layer.key_size, dtype=torch.float64) for layer in layers}

    def run(cache: FactCache | None) -> Any:
        fresh = Setup(tiny_lm(name), setup.editor)  # none of its blocks has run yet
        return _side(fresh, 20, cache).meta_backward(0, batch, shifts)

    run(FactCache(10**6, tmp_path))
    second = FactCache(10**6, tmp_path)
    assert_close(run(second), run(None), rtol=1e-9, atol=1e-11)
    assert second.hits == len(facts)  # each is asked for once


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("tokens", ["answer", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_traces_from_the_cache_equal_those_without_in_any_order(name: str, tokens: str) -> None:
    setup = make_setup(name)
    facts = random_facts(setup.lm, 9)
    side = _side(setup, 20, FactCache(10**6), tokens)
    side.trace(facts[:5])
    shuffled = [facts[place] for place in (7, 3, 0, 8, 4, 1, 6)]
    expected = _side(setup, 1000, None, tokens).trace(shuffled)
    assert_close(side.trace(shuffled), expected, rtol=1e-9, atol=1e-12)
    assert side.facts_run == 5 + 3  # the four that were known were not run again
    side.trace(shuffled, cached=False)
    assert side.facts_run == 5 + 3 + len(shuffled)


def test_a_full_cache_takes_nothing_more_and_gives_the_same() -> None:
    setup = make_setup("gpt2")
    facts = random_facts(setup.lm, 9)
    cache = FactCache(3000)
    for _ in range(2):
        traces = _side(setup, 30, cache).trace(facts)
    assert cache.used_bytes <= 3000
    assert 0 < cache.hits < len(facts)
    assert_close(traces, _side(setup, 30, None).trace(facts), rtol=1e-9, atol=1e-12)


def test_in_bfloat16_any_cut_of_the_work_gives_the_same_within_its_rounding(kind: str) -> None:
    """A micro-batch's gradient is rounded to 8 bits before it is added to the others in float32: 2⁻⁸ of the norm."""
    results = []
    for budget in (20, 10_000):
        setup = make_setup(kind)
        setup.lm.model.bfloat16()
        batch = MetaBatch((), random_facts(setup.lm, 8, 2), random_facts(setup.lm, 6, 3))
        torch.manual_seed(3)
        shifts = {layer.name: 0.1 * torch.randn(layer.value_size, layer.key_size) for layer in setup.editor.layers}
        side = _side(setup, budget, None)
        results.append((*side.meta_backward(0, batch, shifts), len(side.cut(batch.equivalents))))
    (cut_losses, cut_grads, cuts), (losses, grads, _) = results
    assert cuts > 2
    assert_close(torch.tensor(cut_losses), torch.tensor(losses), rtol=1e-5, atol=1e-8)
    for name, grad in grads.items():
        assert grad.dtype == cut_grads[name].dtype == torch.float32 and grad.any()
        assert float((cut_grads[name] - grad).norm() / grad.norm()) < 2**-8


@pytest.mark.usefixtures("exact")
def test_the_coefficient_of_locality_rises_above_its_target_and_falls_below() -> None:
    setup = make_setup("gpt2", training={"locality_target": 0.5, "locality_coef": 2.0})
    facts = random_facts(setup.lm, 3)
    batch, tokens = MetaBatch((), (), facts), sum(len(fact.targets) for fact in facts)
    side = LMSide(setup.lm, setup.editor.layers, setup.editor.config)
    assert side.locality_coef == 2.0 and side.meta_loss(MetaLosses(1.0, 0.25)) == 1.5
    at_target = 0.5 * tokens / len(facts)  # L_loc is per fact, the target per token
    for locality, change in ((at_target, 0.0), (1.5 * at_target, 0.03 * math.log(1.5)), (0.0, -0.03), (1e9, 0.03)):
        side.locality_coef = 2.0
        side.adjust_locality_coef(MetaLosses(1.0, locality), batch)
        assert side.locality_coef == pytest.approx(2.0 * math.exp(change), rel=1e-12)
    fixed = LMSide(setup.lm, setup.editor.layers, make_setup("gpt2").editor.config)
    fixed.adjust_locality_coef(MetaLosses(1.0, 1e9), batch)
    assert fixed.locality_coef == 0.7

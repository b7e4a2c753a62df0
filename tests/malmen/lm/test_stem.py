from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, make_setup, random_facts, tiny_lm
from torch.testing import assert_close

from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import edited
from malmen.lm.stem import keep_stem, resume_stem, stem_blocks
from malmen.lm.trace import trace_facts
from malmen.meta import MetaBatch, make_leaves, meta_backward
from malmen.runs.fact_cache import FactCache


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("rule", ["last:1", "last:2", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_resuming_above_the_stem_equals_the_whole_forward(name: str, rule: str) -> None:
    lm = tiny_lm(name)
    layers = find_layers(lm.model, rule)
    torch.manual_seed(3)
    shifts = {layer.name: torch.randn(layer.value_size, layer.key_size, dtype=torch.float64) for layer in layers}
    (batch,) = make_batches(random_facts(lm, 5), 10_000, 0)
    with edited(lm, shifts):
        expected = lm.logits(batch)
    blocks = stem_blocks(lm, layers)
    with torch.no_grad(), keep_stem(lm, blocks) as stem:
        before = lm.logits(batch)
    with edited(lm, shifts), resume_stem(lm, blocks, stem):
        found = lm.logits(batch)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert_close(lm.logits(batch), before, rtol=0, atol=0)


@pytest.mark.usefixtures("exact")
def test_an_edit_of_the_decoder_alone_keeps_the_whole_encoder() -> None:
    lm = tiny_lm("t5")
    layers = [layer for layer in find_layers(lm.model, "last:1") if layer.stack == "decoder"]
    assert stem_blocks(lm, layers) == {"encoder": 3, "decoder": 2}
    assert stem_blocks(lm, find_layers(lm.model, "last:1")) == {"encoder": 2}
    (batch,) = make_batches(random_facts(lm, 3), 10_000, 0)
    with torch.no_grad(), keep_stem(lm, stem_blocks(lm, layers)) as stem:
        expected = lm.logits(batch)
    with resume_stem(lm, stem_blocks(lm, layers), stem):
        assert_close(lm.logits(batch), expected, rtol=1e-12, atol=1e-12)


def test_blocks_below_the_stem_do_not_run_when_resuming_and_run_again_after_an_exception() -> None:
    lm = tiny_lm("gpt2")
    layers = find_layers(lm.model, "last:1")
    (batch,) = make_batches(random_facts(lm, 3), 10_000, 0)
    runs = []
    lm.model.get_submodule("transformer.h.0.mlp").register_forward_hook(lambda *_: runs.append(1))
    with keep_stem(lm, stem_blocks(lm, layers)) as stem:
        lm.logits(batch)
    assert len(runs) == 1
    with pytest.raises(ZeroDivisionError), resume_stem(lm, stem_blocks(lm, layers), stem):
        lm.logits(batch)
        raise ZeroDivisionError
    assert len(runs) == 1
    lm.logits(batch)
    assert len(runs) == 2


class _Cut:
    """Batches of a fixed budget, and how many were asked for."""

    def __init__(self, lm: LanguageModel, budget: int) -> None:
        self.lm, self.budget, self.facts = lm, budget, 0

    def __call__(self, facts: Sequence[EncodedFact]) -> list[TokenBatch]:
        self.facts += len(facts)
        return make_batches(facts, self.budget, self.lm.pad_id)


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

    def run(cut: _Cut, caches: dict[str, FactCache]) -> tuple[tuple[float, float], dict[str, torch.Tensor]]:
        leaves = make_leaves(lm, shifts)
        losses = meta_backward(lm, layers, leaves, batch, (0.1, 0.2), 0.7, cut, caches)
        return losses, {layer: leaf.grad for layer, leaf in leaves.items() if leaf.grad is not None}

    expected = run(_Cut(lm, 20), {})
    cache = FactCache(10**6)
    caches = {"equivalents": cache, "unrelated": cache}
    for budget in (20, 35, 1000):  # fills the cache, then uses it in batches of another size
        found = run(_Cut(lm, budget), caches)
        assert_close(found, expected, rtol=1e-9, atol=1e-11)
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
        lm = tiny_lm(name)  # none of its blocks has run yet
        leaves, cut = make_leaves(lm, shifts), _Cut(lm, 20)
        caches = {"equivalents": cache, "unrelated": cache} if cache else {}
        losses = meta_backward(lm, layers, leaves, batch, (0.1, 0.2), 0.7, cut, caches)
        return losses, {layer: leaf.grad for layer, leaf in leaves.items()}

    run(FactCache(10**6, tmp_path))
    second = FactCache(10**6, tmp_path)
    assert_close(run(second), run(None), rtol=1e-9, atol=1e-11)
    assert (second.hits, second.misses) == (len(facts), 0)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("tokens", ["answer", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_traces_from_the_cache_equal_those_without_in_any_order(name: str, tokens: str) -> None:
    setup = make_setup(name)
    lm, layers = setup.lm, setup.editor.layers
    facts = random_facts(lm, 9)
    cache, cut = FactCache(10**6), _Cut(lm, 20)
    trace_facts(lm, layers, facts[:5], tokens, cut, cache)
    shuffled = [facts[place] for place in (7, 3, 0, 8, 4, 1, 6)]
    assert_close(
        trace_facts(lm, layers, shuffled, tokens, cut, cache),
        trace_facts(lm, layers, shuffled, tokens, _Cut(lm, 1000)),
        rtol=1e-9,
        atol=1e-12,
    )
    assert cut.facts == 5 + 3  # the four that were known were not run again


def test_a_full_cache_takes_nothing_more_and_gives_the_same() -> None:
    setup = make_setup("gpt2")
    lm, layers = setup.lm, setup.editor.layers
    facts = random_facts(lm, 9)
    cache, cut = FactCache(3000), _Cut(lm, 30)
    for _ in range(2):
        found = trace_facts(lm, layers, facts, "answer", cut, cache)
    assert cache.used_bytes <= 3000
    assert 0 < cache.hits < len(facts)
    assert_close(found, trace_facts(lm, layers, facts, "answer", cut), rtol=1e-9, atol=1e-12)

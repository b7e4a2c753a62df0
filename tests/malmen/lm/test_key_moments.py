from __future__ import annotations

from dataclasses import replace

import plain
import pytest
import torch
from tiny_models import make_setup, random_facts
from torch.testing import assert_close

from malmen.data.tokens import make_batches
from malmen.lm.key_moments import KeySums, layers_at_once, sums_bytes
from malmen.lm.layers import LayerSpec


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_the_moments_are_the_mean_over_all_tokens_of_all_texts_however_they_are_cut(kind: str, budget: int) -> None:
    setup = make_setup(kind)
    facts = random_facts(setup.lm, 7, 4)
    sums = KeySums(setup.lm, setup.editor.layers)
    for batch in make_batches(facts, budget, setup.lm.pad_id):
        sums.read(batch)
    moments = sums.moments()
    for name, (keys, _) in plain.plain_traces(setup.lm, setup.editor.layers, facts, "all").items():
        assert_close(moments[name], keys.T @ keys / len(keys), rtol=1e-9, atol=1e-12)


def test_a_batch_that_does_not_count_adds_nothing_and_no_hook_stays() -> None:
    setup = make_setup("gpt2")
    sums = KeySums(setup.lm, setup.editor.layers)
    (batch,) = make_batches(random_facts(setup.lm, 3), 10_000, 0)
    sums.read(batch)
    before = {name: total.clone() for name, total in sums.sums.items()}
    sums.read(replace(batch, counts=False))
    assert all(torch.equal(total, before[name]) for name, total in sums.sums.items())
    assert not any(module._forward_pre_hooks for module in setup.lm.model.modules())


def test_no_more_layers_are_read_at_once_than_their_sums_have_room() -> None:
    layers = [LayerSpec(str(place), size, 4) for place, size in enumerate((10, 10, 10, 30, 10))]
    parts = layers_at_once(layers, limit=1600)
    assert [[layer.name for layer in part] for part in parts] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [sums_bytes(part) for part in parts] == [1600, 800, 7200, 800]
    assert layers_at_once(layers) == [layers]

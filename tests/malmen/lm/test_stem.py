from __future__ import annotations

import pytest
import torch
from tiny_models import MODELS, random_facts, tiny_lm
from torch.testing import assert_close

from malmen.data.tokens import make_batches
from malmen.lm.layers import find_layers
from malmen.lm.overlay import edited
from malmen.lm.stem import Stem, fill_or_resume, stem_blocks


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
    stem = Stem(stem_blocks(lm, layers))
    with torch.no_grad(), fill_or_resume(lm, stem):
        before = lm.logits(batch)
    with edited(lm, shifts), fill_or_resume(lm, stem):
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
    stem = Stem(stem_blocks(lm, layers))
    with torch.no_grad(), fill_or_resume(lm, stem):
        expected = lm.logits(batch)
    with fill_or_resume(lm, stem):
        assert_close(lm.logits(batch), expected, rtol=1e-12, atol=1e-12)


def test_blocks_below_the_stem_do_not_run_when_resuming_and_run_again_after_an_exception() -> None:
    lm = tiny_lm("gpt2")
    layers = find_layers(lm.model, "last:1")
    (batch,) = make_batches(random_facts(lm, 3), 10_000, 0)
    runs = []
    lm.model.get_submodule("transformer.h.0.mlp").register_forward_hook(lambda *_: runs.append(1))
    stem = Stem(stem_blocks(lm, layers))
    with fill_or_resume(lm, stem):
        lm.logits(batch)
    assert len(runs) == 1
    with pytest.raises(ZeroDivisionError), fill_or_resume(lm, stem):
        lm.logits(batch)
        raise ZeroDivisionError
    assert len(runs) == 1
    lm.logits(batch)
    assert len(runs) == 2

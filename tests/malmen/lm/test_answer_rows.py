"""What is left out reaches nothing: losses, shift gradients and traces are those of the whole model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from plain import plain_traces
from tiny_models import KINDS, MODELS, make_setup, random_facts, tiny_lm
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from untouched import count_hooks, digest

from malmen.data.tokens import make_batches
from malmen.lm.answer_rows import answer_grads_only, answers_only
from malmen.lm.layers import find_layers
from malmen.lm.losses import kl, nll
from malmen.lm.overlay import Overlay, edited
from malmen.lm.trace import trace

pytestmark = pytest.mark.usefixtures("exact")
DECODERS = [name for name, (_, kind) in MODELS.items() if kind == "decoder"]


@pytest.mark.parametrize("layers", ["last:2", "every:2"])
@pytest.mark.parametrize("name", DECODERS)
def test_losses_and_shift_gradients_are_those_of_the_whole_model(name: str, layers: str) -> None:
    setup = make_setup(name, layers=layers)
    (batch,) = make_batches(random_facts(setup.lm, 7), 10_000, 0)[-1:]
    assert not batch.answer_mask.all()
    torch.manual_seed(3)
    specs = find_layers(setup.lm.model, layers, "first") + find_layers(setup.lm.model, layers, "second")
    shifts = {layer.name: torch.randn(layer.value_size, layer.key_size, dtype=torch.float64) for layer in specs}
    results, flops = [], []
    for spared in (answers_only, lambda *_: nullcontext()):
        edit = Overlay.of_leaves(setup.lm, shifts)
        with FlopCounterMode(display=False) as counter:
            with torch.no_grad(), spared(setup.lm, batch):
                reference = setup.lm.log_probs(batch)
            with edited(setup.lm, edit), spared(setup.lm, batch):
                log_probs = setup.lm.log_probs(batch)
                losses = nll(log_probs, batch.targets), kl(reference, log_probs)
                (losses[0] + 0.7 * losses[1]).backward()
        results.append((losses, edit.grads()))
        flops.append(counter.get_total_flops())
    assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)
    assert flops[0] < 0.95 * flops[1]


@pytest.mark.parametrize("tokens", ["answer", "all"])
@pytest.mark.parametrize("name", DECODERS)
def test_traces_are_those_of_the_whole_model(name: str, tokens: str) -> None:
    lm = tiny_lm(name)
    layers, facts = find_layers(lm.model, "all", "first") + find_layers(lm.model, "all"), random_facts(lm, 6)
    found = trace(lm, layers, make_batches(facts, 30, 0), tokens)
    assert_close(found, plain_traces(lm, layers, facts, tokens), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", sorted({*KINDS} - {*DECODERS}))
def test_a_model_that_is_no_decoder_runs_as_it_is(name: str) -> None:
    lm = tiny_lm(name)
    (batch,) = make_batches(random_facts(lm, 5), 10_000, 0)
    with answers_only(lm, batch), answer_grads_only(lm, batch):
        assert not any("forward" in module.__dict__ for module in lm.model.modules())


def test_the_model_is_as_before_also_when_its_forward_fails() -> None:
    lm = tiny_lm("gpt2")
    (batch,) = make_batches(random_facts(lm, 5), 10_000, 0)[-1:]
    before: Any = digest(lm), count_hooks(lm)
    with pytest.raises(ZeroDivisionError), answer_grads_only(lm, batch), answers_only(lm, batch):
        raise ZeroDivisionError
    assert (digest(lm), count_hooks(lm)) == before
    assert not any("forward" in module.__dict__ for module in lm.model.modules())

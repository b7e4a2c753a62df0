from __future__ import annotations

import random

import pytest
import torch
from plain import plain_traces
from tiny_models import random_facts, tiny_lm
from torch.testing import assert_close
from untouched import count_hooks, digest

from malmen.data.tokens import make_batches
from malmen.lm.layers import LayerSpec, find_layers
from malmen.lm.model import LanguageModel
from malmen.lm.trace import Traces, trace

pytestmark = pytest.mark.usefixtures("exact")


def _layers(lm: LanguageModel) -> list[LayerSpec]:
    """Both linears of the last two FFNs, the later first: no order is needed."""
    return find_layers(lm.model, "last:2", "second")[::-1] + find_layers(lm.model, "last:2", "first")


def _assert_equal(found: Traces, expected: Traces) -> None:
    assert list(found) == list(expected)
    for name, (keys, value_grads) in expected.items():
        assert value_grads.any(), name
        assert_close(found[name].keys, keys, rtol=1e-9, atol=1e-11)
        assert_close(found[name].value_grads, value_grads, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("budget", [1, 17, 10_000])
@pytest.mark.parametrize("tokens", ["answer", "all"])
def test_keys_and_value_gradients_are_those_of_each_fact_by_itself_in_the_order_of_facts(
    kind: str, tokens: str, budget: int
) -> None:
    lm = tiny_lm(kind)
    layers, facts = _layers(lm), random_facts(lm, 6)
    lengths = [fact.length for fact in facts]
    assert lengths != sorted(lengths)  # batches are made by length, so the order has to be restored
    found = trace(lm, layers, make_batches(facts, budget, 0), tokens)
    _assert_equal(found, plain_traces(lm, layers, facts, tokens))


@pytest.mark.parametrize("tokens", ["answer", "all"])
def test_an_ffn_that_sees_the_tokens_of_all_facts_in_one_row_is_traced_alike(tokens: str) -> None:
    lm = tiny_lm("opt")
    layers, facts = _layers(lm), random_facts(lm, 6)
    _assert_equal(trace(lm, layers, make_batches(facts, 17, 0), tokens), plain_traces(lm, layers, facts, tokens))


def test_the_order_in_which_batches_come_does_not_matter(kind: str) -> None:
    lm = tiny_lm(kind)
    layers, batches = _layers(lm), make_batches(random_facts(lm, 9), 20, 0)
    expected = trace(lm, layers, batches, "answer")
    shuffled = random.Random(0).sample(batches, len(batches))
    assert [batch.facts.tolist() for batch in shuffled] != [batch.facts.tolist() for batch in batches]
    found = trace(lm, layers, shuffled, "answer")
    for name, layer in expected.items():
        assert torch.equal(found[name].keys, layer.keys)
        assert torch.equal(found[name].value_grads, layer.value_grads)


def test_more_than_the_answer_is_traced_only_where_asked_for_or_in_an_encoder() -> None:
    for name in ("gpt2", "t5"):
        lm = tiny_lm(name)
        facts = random_facts(lm, 6)
        answers = sum(len(fact.targets) for fact in facts)
        for tokens in ("answer", "all"):
            traces = trace(lm, _layers(lm), make_batches(facts, 40, 0), tokens)
            for layer in _layers(lm):
                inputs = [(fact.encoder_ids or []) if layer.stack == "encoder" else fact.input_ids for fact in facts]
                whole = tokens == "all" or layer.stack == "encoder"
                assert len(traces[layer.name].keys) == (sum(map(len, inputs)) if whole else answers)


def test_the_model_stays_frozen_and_bit_equal_and_the_traces_carry_no_graph(kind: str) -> None:
    lm = tiny_lm(kind)
    before, hooks = digest(lm), count_hooks(lm)
    traces = trace(lm, _layers(lm), make_batches(random_facts(lm, 4), 40, 0), "answer")
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())
    assert all(parameter.grad is None for parameter in lm.model.parameters())
    assert (digest(lm), count_hooks(lm)) == (before, hooks)
    assert not any(part.requires_grad for layer in traces.values() for part in layer)


def test_tracing_works_where_gradients_are_switched_off(kind: str) -> None:
    lm = tiny_lm(kind)
    layers, batches = _layers(lm), make_batches(random_facts(lm, 4), 40, 0)
    expected = trace(lm, layers, batches, "answer")
    with torch.no_grad():
        found = trace(lm, layers, batches, "answer")
        assert not torch.is_grad_enabled()
    _assert_equal(found, expected)


def test_hooks_are_removed_also_when_the_forward_raises(kind: str) -> None:
    lm = tiny_lm(kind)
    hooks = count_hooks(lm)
    (batch,) = make_batches(random_facts(lm, 3), 10_000, 0)
    expected = lm.logits(batch)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    last = lm.model.get_submodule(find_layers(lm.model, "last:1")[-1].name)
    handle = last.register_forward_hook(fail)  # after every other edited layer has run
    with pytest.raises(ZeroDivisionError):
        trace(lm, _layers(lm), [batch], "answer")
    handle.remove()
    assert count_hooks(lm) == hooks
    assert torch.equal(lm.logits(batch), expected)

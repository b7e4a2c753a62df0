from __future__ import annotations

from dataclasses import replace

import plain
import pytest
import torch
from tiny_models import make_setup, random_facts
from torch.testing import assert_close

from malmen.data.tokens import EncodedFact, make_batches
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


@pytest.mark.parametrize("budget", [1, 40, 10_000])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_moments_of_differences_pair_the_answers_tokens_however_they_are_cut(name: str, budget: int) -> None:
    setup = make_setup(name)
    facts = random_facts(setup.lm, 7, 4)
    others = random_facts(setup.lm, 7, 5)
    if setup.lm.kind == "decoder":  # other prompts, the same answers
        prompts = [other.input_ids[: other.first + 1] for other in others]
        others = [
            EncodedFact(prompt + fact.targets[:-1], len(prompt) - 1, fact.targets)
            for prompt, fact in zip(prompts, facts, strict=True)
        ]
    sums = KeySums(setup.lm, setup.editor.layers)
    sums.read_differences(*(make_batches(some, budget, setup.lm.pad_id) for some in (facts, others)))
    moments = sums.moments()
    traces = [plain.plain_traces(setup.lm, setup.editor.layers, some, "answer") for some in (facts, others)]
    for name in (layer.name for layer in setup.editor.layers):
        rows = traces[0][name].keys - traces[1][name].keys
        assert len(rows) > 3 and rows.norm() > 0.1
        assert_close(moments[name], rows.T @ rows / len(rows), rtol=1e-9, atol=1e-12)


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

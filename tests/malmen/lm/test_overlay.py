from __future__ import annotations

import pytest
import torch
from tiny_models import MODELS, random_facts, tiny_lm
from torch import nn
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D
from untouched import count_hooks, digest

from malmen.data.tokens import make_batches
from malmen.errors import EditError
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import Overlay, edited, edited_rows, upright_weight

pytestmark = pytest.mark.usefixtures("exact")


def _shifts(lm: LanguageModel, names: list[str] | str = "last:2") -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        layer.name: torch.randn(layer.value_size, layer.key_size, dtype=torch.float64)
        for layer in find_layers(lm.model, names)
    }


def _write(lm: LanguageModel, shifts: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, shift in shifts.items():
            module = lm.model.get_submodule(name)
            assert isinstance(module, nn.Linear | Conv1D)
            module.weight += shift.T if isinstance(module, Conv1D) else shift


@pytest.mark.parametrize("name", MODELS)
def test_the_overlay_equals_weights_that_were_really_changed(name: str) -> None:
    lm, changed = tiny_lm(name), tiny_lm(name)
    shifts = _shifts(lm)
    _write(changed, shifts)
    (batch,) = make_batches(random_facts(lm, 4), 10_000, 0)
    with edited(lm, shifts):
        found = lm.logits(batch)
    assert not torch.allclose(found, lm.logits(batch))
    assert_close(found, changed.logits(batch), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "layer"), [("gpt2", "transformer.h.1.attn.c_proj"), ("llama", "model.layers.1.self_attn.q_proj")]
)
def test_square_layers_are_not_confused_with_their_transposes(name: str, layer: str) -> None:
    lm, changed = tiny_lm(name), tiny_lm(name)
    shifts = _shifts(lm, [layer])
    assert shifts[layer].shape[0] == shifts[layer].shape[1]
    _write(changed, shifts)
    (batch,) = make_batches(random_facts(lm, 4), 10_000, 0)
    with edited(lm, shifts):
        assert_close(lm.logits(batch), changed.logits(batch), rtol=1e-9, atol=1e-10)


def test_the_model_is_bit_identical_afterwards_also_when_an_exception_passes_through(kind: str) -> None:
    lm = tiny_lm(kind)
    before, hooks = digest(lm), count_hooks(lm)
    (batch,) = make_batches(random_facts(lm, 4), 10_000, 0)
    logits = lm.logits(batch)
    with pytest.raises(ZeroDivisionError), edited(lm, _shifts(lm)):
        lm.logits(batch)
        raise ZeroDivisionError
    assert digest(lm) == before
    assert count_hooks(lm) == hooks
    assert torch.equal(lm.logits(batch), logits)


def test_the_gradient_of_a_leaf_is_the_gradient_of_the_edited_weight(kind: str) -> None:
    lm, changed = tiny_lm(kind), tiny_lm(kind)
    shifts = {name: shift.requires_grad_() for name, shift in _shifts(lm).items()}
    _write(changed, {name: shift.detach() for name, shift in shifts.items()})
    (batch,) = make_batches(random_facts(lm, 4), 10_000, 0)
    with edited(lm, shifts):
        lm.log_probs(batch)[:, 0].sum().backward()
    for name in shifts:
        weight = changed.model.get_parameter(f"{name}.weight").requires_grad_()
        changed.log_probs(batch)[:, 0].sum().backward()
        grad = weight.grad
        assert grad is not None
        weight.requires_grad_(False).grad = None
        expected = grad.T if isinstance(changed.model.get_submodule(name), Conv1D) else grad
        assert_close(shifts[name].grad, expected, rtol=1e-9, atol=1e-12)


def test_an_edit_inside_another_adds_to_it_and_leaves_it_behind(kind: str) -> None:
    lm, changed = tiny_lm(kind), tiny_lm(kind)
    first = {name: shift.requires_grad_() for name, shift in _shifts(lm).items()}
    second = {name: (0.5 * shift.detach().flip(0)).requires_grad_() for name, shift in first.items()}
    before, hooks = digest(lm), count_hooks(lm)
    (batch,) = make_batches(random_facts(lm, 4), 10_000, 0)
    with edited(lm, first):
        alone = lm.logits(batch)
        with edited(lm, second):
            found = lm.logits(batch)
        assert torch.equal(lm.logits(batch), alone)
    _write(changed, {name: shift.detach() + second[name].detach() for name, shift in first.items()})
    assert not torch.allclose(found, alone)
    assert_close(found, changed.logits(batch), rtol=1e-9, atol=1e-10)
    found.log_softmax(-1)[:, 0].sum().backward()
    for name, shift in first.items():  # W + S₁ + S₂ has one gradient
        assert shift.grad is not None
        assert_close(second[name].grad, shift.grad, rtol=1e-9, atol=1e-12)
    assert (digest(lm), count_hooks(lm)) == (before, hooks)


@pytest.mark.parametrize("layer", ["transformer.h.1.mlp.c_proj", "transformer.h.1.attn.c_proj"])
def test_adding_to_the_output_and_merging_into_the_weight_agree_in_value_and_gradient(layer: str) -> None:
    lm = tiny_lm("gpt2")
    (batch,) = make_batches(random_facts(lm, 4), 10_000, 0)
    found = []
    for merged in (False, True):
        shift = _shifts(lm, [layer])[layer].requires_grad_()
        weight = upright_weight(lm.model.get_submodule(layer)) + shift
        overlay = Overlay({layer: weight}, {}) if merged else Overlay({}, {layer: shift})
        with edited_rows(lm, [(overlay, 4)]):
            log_probs = lm.log_probs(batch)
        log_probs[:, 0].sum().backward()
        found.append((log_probs.detach(), shift.grad))
    assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_half_precision_does_not_swallow_a_small_shift() -> None:
    half = LanguageModel(tiny_lm("gpt2").model.to(torch.bfloat16), None, "decoder")
    layer = "transformer.h.2.mlp.c_proj"
    module = half.model.get_submodule(layer)
    signs = torch.tensor([1.0, -1.0]).repeat(24)[:, None]
    half.model.get_parameter(f"{layer}.weight").copy_(signs.expand(48, 12))  # 1 + 0.001 is 1 in bfloat16
    with edited(half, {layer: torch.full((12, 48), 1e-3)}):
        found = module(torch.ones(1, 48, dtype=torch.bfloat16))
    assert_close(found.double(), torch.full((1, 12), 0.048, dtype=torch.float64), rtol=0.01, atol=0)


def test_an_edit_of_another_model_is_refused() -> None:
    lm = tiny_lm("gpt2")
    with (
        pytest.raises(EditError, match="no linear layer"),
        edited(lm, {"model.layers.0.mlp.down_proj": torch.zeros(1, 1)}),
    ):
        pass
    with (
        pytest.raises(EditError, match=r"shift is \(3, 4\); expected \(12, 48\)"),
        edited(lm, {"transformer.h.0.mlp.c_proj": torch.zeros(3, 4)}),
    ):
        pass

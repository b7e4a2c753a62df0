"""LoRA trains two thin factors beside each frozen weight, and nothing else."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from plain import plain_traces
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.testing import assert_close
from untouched import count_hooks, digest
from worded_models import DECODERS, worded_lm

from malmen.config import Config
from malmen.data.tokens import EncodedFact, one_batch
from malmen.data.world import world_records
from malmen.errors import EditError
from malmen.evaluate import predict_tokens
from malmen.lm.layers import is_conv1d
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import edited
from malmen.methods.lora import LoRA, low_rank

FACTS = [record.edit for record in world_records("validation")[:7]]
SETTINGS: dict[str, Any] = {
    "layers": "last:2", "rank": 3, "alpha": 5, "lr": 0.01, "epochs": 3, "batch_facts": 3, "stop_early": False,
}  # fmt: skip


def make_config(**changes: Any) -> Config:
    return Config.model_validate({"seed": 4, "baselines": {"lora": {**SETTINGS, **changes}}})


def encode(lm: LanguageModel, config: Config) -> list[EncodedFact]:
    encoder = fact_encoder(lm, config.data)
    return [encoder.encode(fact) for fact in FACTS]


def train_copy(model: nn.Module, facts: list[EncodedFact], optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Fact by fact with torch alone: no hooks, no batches, no losses of ours."""
    for epoch in range(epochs):
        order = random.Random(f"lora/4/{epoch}").sample(facts, len(facts))
        for first in range(0, len(order), 3):
            some = order[first : first + 3]
            optimizer.zero_grad()
            for fact in some:
                logits = model(torch.tensor([fact.input_ids])).logits[0, fact.first :]
                loss = torch.nn.functional.cross_entropy(logits, torch.tensor(fact.targets), reduction="sum")
                (loss / len(some)).backward()
            optimizer.step()


class PlusProduct(nn.Module):
    """A weight as W + s B A, in the weight's own orientation."""

    def __init__(self, down: Tensor, up: Tensor, scale: float, transposed: bool) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down.detach().clone()), nn.Parameter(up.detach().clone())
        self.scale, self.transposed = scale, transposed

    def forward(self, weight: Tensor) -> Tensor:
        product = self.scale * (self.up @ self.down)
        return weight + (product.T if self.transposed else product)


@pytest.mark.parametrize("name", DECODERS)
def test_the_shift_is_what_adam_does_to_the_factors_of_a_reparametrised_copy(name: str) -> None:
    lm, config = worded_lm(name), make_config()
    method = LoRA(lm, config)
    shifts = method.edit(lm, FACTS).shifts
    model, added = copy.deepcopy(lm.model), {}
    for layer, start in method.start(lm).items():
        module = model.get_submodule(layer)
        added[layer] = PlusProduct(start.down, start.up, 5 / 3, is_conv1d(module))
        parametrize.register_parametrization(module, "weight", added[layer])
    leaves = [leaf for part in added.values() for leaf in part.parameters()]
    train_copy(model, encode(lm, config), torch.optim.Adam(leaves, lr=0.01), 3)
    for layer, part in added.items():
        assert_close(shifts[layer], (5 / 3 * part.up @ part.down).detach(), rtol=1e-8, atol=1e-10)
        assert float(shifts[layer].norm()) > 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_at_full_rank_gradient_descent_of_b_alone_is_gradient_descent_of_the_weight(name: str) -> None:
    """With A orthogonal, ∇_B = s ∇_W Aᵀ, so a step of B by −η changes s B A by −η s² ∇_W."""
    lm, config = worded_lm(name), make_config(rank=64, alpha=32)
    method = LoRA(lm, config)
    factors = method.start(lm)
    for part in factors.values():
        square, _ = torch.linalg.qr(torch.randn(64, part.down.shape[1], dtype=torch.float64))
        part.down.data.copy_(square)  # more rows than columns: AᵀA = I
    method.fit(lm, FACTS, factors, torch.optim.SGD([part.up for part in factors.values()], lr=0.2))
    model = copy.deepcopy(lm.model)
    weights = {layer: model.get_submodule(layer).get_parameter("weight").requires_grad_() for layer in factors}
    train_copy(model, encode(lm, config), torch.optim.SGD(weights.values(), lr=0.2 * 0.5**2), 3)
    for layer, weight in weights.items():
        change = (weight - lm.model.get_submodule(layer).get_parameter("weight")).detach()
        wanted = change.T if is_conv1d(model.get_submodule(layer)) else change
        assert_close(factors[layer].shift(), wanted, rtol=1e-8, atol=1e-12)


def test_the_first_step_moves_b_by_the_gradients_sign_and_leaves_a() -> None:
    """B = 0 hides A from the loss; Adam's first step of B is −η ∇/|∇| of s Σ ∇_v (A u)ᵀ, which the traces give."""
    lm, config = worded_lm("gptj"), make_config(epochs=1, batch_facts=7)
    method = LoRA(lm, config)
    shifts, started = method.edit(lm, FACTS).shifts, method.start(lm)
    for layer, traced in plain_traces(lm, method.layers, encode(lm, config), "all").items():
        down = started[layer].down.detach()
        grad = 5 / 3 * traced.value_grads.T @ traced.keys @ down.T / len(FACTS)
        assert_close(shifts[layer], 5 / 3 * (-0.01 * grad / (grad.abs() + 1e-8)) @ down, rtol=1e-6, atol=1e-9)


def test_peft_trains_the_same_adapter_from_the_same_start() -> None:
    peft = pytest.importorskip("peft")
    lm, config = worded_lm("llama"), make_config()
    method = LoRA(lm, config)
    shifts = method.edit(lm, FACTS).shifts
    theirs = peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(shifts), task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(lm.model), theirs, autocast_adapter_dtype=False)
    adapted = {layer: model.base_model.model.get_submodule(layer) for layer in shifts}
    for layer, start in method.start(lm).items():
        own = adapted[layer]
        assert_close(own.lora_B["default"].weight, start.up, check_dtype=False)
        own.lora_A["default"].weight.data = start.down.detach().clone()
        own.lora_B["default"].weight.data = start.up.detach().clone()
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    assert len(leaves) == 2 * len(shifts)
    train_copy(model, encode(lm, config), torch.optim.Adam(leaves, lr=0.01), 3)
    for layer, module in adapted.items():
        assert_close(shifts[layer], module.get_delta_weight("default").detach(), rtol=1e-8, atol=1e-10)


def test_shifts_have_the_rank_at_most_and_the_model_stays_as_it_is() -> None:
    lm = worded_lm("gpt2")
    before = digest(lm), count_hooks(lm)
    random_state = torch.get_rng_state()
    edit = LoRA(lm, make_config(rank=2)).edit(lm, FACTS)
    assert (digest(lm), count_hooks(lm)) == before and torch.equal(torch.get_rng_state(), random_state)
    assert sorted(edit.shifts) == [
        f"transformer.h.{block}.mlp.{name}" for block in (2, 3) for name in ("c_fc", "c_proj")
    ]
    for shift in edit.shifts.values():
        assert int(torch.linalg.matrix_rank(shift)) == 2
    assert edit.mean_residual() is None


def test_training_under_factors_and_the_shifts_afterwards_are_the_same_model() -> None:
    lm, config = worded_lm("opt"), make_config()
    method, facts = LoRA(lm, config), encode(worded_lm("opt"), config)
    factors = method.start(lm)
    method.fit(lm, FACTS, factors, torch.optim.SGD([part.up for part in factors.values()], lr=1.0))
    batch = one_batch(facts, lm.pad_id)
    with torch.no_grad():
        with low_rank(lm, factors):
            under = lm.log_probs(batch)
        with edited(lm, {layer: part.shift() for layer, part in factors.items()}):
            assert_close(lm.log_probs(batch), under)
        assert not torch.allclose(lm.log_probs(batch), under)


def test_it_ends_after_the_first_epoch_after_which_every_answer_holds(lm: LanguageModel) -> None:
    changes = {"layers": "last:1", "lr": 3e-3, "rank": 8}
    method = LoRA(lm, make_config(stop_early=True, epochs=60, **changes))
    factors = method.start(lm)
    leaves = [leaf for part in factors.values() for leaf in (part.down, part.up)]
    epochs = method.fit(lm, FACTS[:3], factors, torch.optim.Adam(leaves, lr=3e-3))
    assert 1 < epochs < 60
    facts, held = encode(lm, method.config)[:3], []
    for number in (epochs - 1, epochs):  # as many, without looking
        with edited(lm, LoRA(lm, make_config(epochs=number, **changes)).edit(lm, FACTS[:3]).shifts):
            held.append(predict_tokens(lm, facts, 1000) == [fact.targets for fact in facts])
    assert held == [False, True]


def test_no_facts_are_an_error() -> None:
    lm = worded_lm("gpt2")
    with pytest.raises(EditError, match="no facts"):
        LoRA(lm, make_config()).edit(lm, [])

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from malmen.config import EditorConfig
from malmen.hypernet import HyperNetwork, LowRankBlock, RunningNorm, Statistics


def _rows(number: int = 50, features: int = 6) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(number, features, dtype=torch.float64) * 3 + 100


@pytest.mark.parametrize("size", [1, 7, 50])
def test_any_cut_of_the_rows_gives_the_statistics_of_all(size: int) -> None:
    rows = _rows()
    norm = RunningNorm(2, 6)
    for part in rows.split(size):
        norm.merge(1, Statistics.of(part))
    assert_close(norm.mean[1], rows.mean(0), rtol=1e-12, atol=0)
    assert_close(norm.deviation()[1], rows.std(0, correction=0), rtol=1e-12, atol=0)
    assert_close(norm.mean[0], torch.zeros(6, dtype=torch.float64))


def test_one_row_leaves_finite_statistics_that_later_rows_mend() -> None:
    rows = _rows()
    norm = RunningNorm(1, 6)
    norm.merge(0, Statistics.of(rows[:1]))
    assert_close(norm(torch.tensor([0]), rows[:1]), torch.zeros(1, 6, dtype=torch.float64))
    norm.merge(0, Statistics.of(rows[1:]))
    assert_close(norm.deviation()[0], rows.std(0, correction=0), rtol=1e-12, atol=0)


def test_statistics_of_parts_are_those_of_all_rows_even_if_a_part_is_empty() -> None:
    rows = _rows()
    whole = Statistics.of(rows)
    parts = [Statistics.of(part) for part in (rows[:0], rows[:1], rows[1:30], rows[30:30], rows[30:])]
    merged = parts[0].merged(parts[1]).merged(parts[2]).merged(parts[3].merged(parts[4]))
    assert float(merged.count) == 50
    assert_close(merged.mean, whole.mean, rtol=1e-13, atol=0)
    assert_close(merged.squares, whole.squares, rtol=1e-12, atol=0)


def test_no_rows_change_nothing() -> None:
    norm = RunningNorm(1, 6)
    norm.merge(0, Statistics.of(_rows()[:0]))
    assert float(norm.count) == 0


def test_a_feature_that_never_varies_is_not_blown_up() -> None:
    rows = torch.full((1000, 3), 0.1, dtype=torch.float32)
    norm = RunningNorm(1, 3)
    for part in rows.split(17):
        norm.merge(0, Statistics.of(part))
    assert norm(torch.tensor([0]), rows[:1]).abs().max() < 1e-6


def test_statistics_do_not_change_outside_merge() -> None:
    net = HyperNetwork(1, 4, 2, EditorConfig(rank=3, edit_lr=1e-6)).double().train()
    before = {name: value.clone() for name, value in net.norm.state_dict().items()}
    rows = _rows(5)
    net(torch.zeros(5, dtype=torch.long), rows[:, :4], rows[:, 4:])
    assert all(torch.equal(value, before[name]) for name, value in net.norm.state_dict().items())


def test_the_network_is_the_identity_of_the_normalised_input_at_the_start() -> None:
    rows = _rows()
    net = HyperNetwork(1, 4, 2, EditorConfig(rank=3, edit_lr=0.01)).double()
    net.norm.merge(0, Statistics.of(rows))
    layers = torch.zeros(len(rows), dtype=torch.long)
    pseudo_keys, scaled_grads, _ = net(layers, rows[:, :4], rows[:, 4:])
    normal = (rows - rows.mean(0)) / rows.std(0, correction=0)
    assert_close(pseudo_keys, normal[:, :4])
    assert_close(scaled_grads, -0.01 * normal[:, 4:], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("how", ["paper", "relative"])
def test_every_parameter_that_can_learn_at_the_start_has_a_gradient(how: Any) -> None:
    rows = _rows()
    net = HyperNetwork(1, 4, 2, EditorConfig(rank=3, edit_lr=0.01, parametrisation=how)).double()
    net.norm.merge(0, Statistics.of(rows))
    pseudo_keys, scaled_grads, _ = net(torch.zeros(len(rows), dtype=torch.long), rows[:, :4], rows[:, 4:])
    (pseudo_keys.sum() + (scaled_grads * torch.randn_like(scaled_grads)).sum()).backward()
    silent = {name for name, value in net.named_parameters() if value.grad is None or not value.grad.any()}
    # `down` waits for `up` to leave zero; `scale` multiplies zero; damping acts in the normal equation.
    assert silent == {f"blocks.{b}.{p}" for b in (0, 1) for p in ("down", "scale")} | {"log_damping"}


def test_a_block_and_its_gradients_are_those_of_its_formula_also_where_it_adds_nothing() -> None:
    torch.manual_seed(0)
    block = LowRankBlock(3, 6, EditorConfig(rank=4, parametrisation="relative")).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter))
        for parameter in (block.up, block.bias, block.shift):
            parameter[..., :2] = parameter[:2] = 0  # the first features of layer 0 add exactly 0
    layers, rows = torch.tensor([0, 0, 2, 1, 2, 0, 1]), _rows(7).sub(100).requires_grad_()
    change = torch.nn.functional.linear(rows @ block.down.T, block.up, block.bias)
    plain = rows + (change * block.scale[layers] + block.shift[layers]).clamp(min=0)
    found, weights = block(layers, rows), torch.randn(7, 6, dtype=torch.float64)
    assert_close(found, plain, rtol=1e-14, atol=0)
    of = [rows, *block.parameters()]
    grads = (torch.autograd.grad((output * weights).sum(), of, retain_graph=True) for output in (found, plain))
    assert_close(*grads, rtol=1e-13, atol=1e-13)
    assert (found == rows).any() and not (found == rows).all()


def test_one_step_of_the_papers_learning_rate_moves_eta_and_the_network_as_far_as_it_did_for_its_authors() -> None:
    """Adam's first step moves each parameter by its rate: η from 1e-6 to 1.1e-5, or by 0.001 %."""
    rows = torch.randn(200, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for how, change_of_eta in (("paper", 10.0), ("relative", 1e-5)):
        torch.manual_seed(0)
        net = HyperNetwork(1, 64, 32, EditorConfig(rank=1920, edit_lr=1e-6, parametrisation=how)).double()
        net.norm.merge(0, Statistics.of(rows))
        layers = torch.zeros(len(rows), dtype=torch.long)
        adam = torch.optim.Adam(net.parameters(), lr=1e-5)
        before, _, _ = net(layers, rows[:, :64], rows[:, 64:])
        (net(layers, rows[:, :64], rows[:, 64:])[1].mul(rows[:, 64:]).sum() - before[:4].sum()).backward()
        adam.step()
        after, _, _ = net(layers, rows[:, :64], rows[:, 64:])
        assert abs(float(net.eta().detach() / 1e-6) - 1) == pytest.approx(change_of_eta, rel=0.05)
        moved = float((after - before)[:4].detach().norm() / before[:4].detach().norm())
        assert moved > 0.03 if how == "paper" else moved < 0.01, moved


def test_rows_of_different_layers_can_share_a_batch() -> None:
    rows = _rows(9)
    net = HyperNetwork(3, 4, 2, EditorConfig(rank=3, edit_lr=1e-6)).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))
    for layer in range(3):
        net.norm.merge(layer, Statistics.of(rows[layer:]))
    layers = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1])
    together = net(layers, rows[:, :4], rows[:, 4:])
    for index, layer in enumerate(layers):
        alone = net(layer[None], rows[index : index + 1, :4], rows[index : index + 1, 4:])
        assert_close(together[0][index : index + 1], alone[0], rtol=1e-12, atol=1e-12)
        assert_close(together[1][index : index + 1], alone[1], rtol=1e-12, atol=1e-18)


def test_tokens_weigh_the_same_at_the_start_and_may_learn_to_weigh_by_their_gradients() -> None:
    rows = _rows() - 100
    rows[:25, 4:] *= 1e-3  # tokens that are right already
    net = HyperNetwork(1, 4, 2, EditorConfig(rank=3, token_weights="learned")).double()
    net.norm.merge(0, Statistics.of(rows))
    layers = torch.zeros(len(rows), dtype=torch.long)
    roots = net(layers, rows[:, :4], rows[:, 4:])[2]
    assert roots is not None
    assert_close(roots, torch.ones_like(roots))
    assert net.token_weight_scalars is not None
    (gradient,) = torch.autograd.grad(roots[:25].sum() - roots[25:].sum(), net.token_weight_scalars)
    with torch.no_grad():
        net.token_weight_scalars.sub_(gradient / gradient[0, 1].abs() * 2)  # a step that wants the first half lighter
    weights = net(layers, rows[:, :4], rows[:, 4:])[2]
    assert weights is not None and weights[:25].max() < 0.1 * weights[25:].median()

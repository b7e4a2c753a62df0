from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from malmen.errors import EditError
from malmen.least_squares import DualSolution, NormalEquation, PrimalSolution, solve_least_squares


def _problem(tokens: int = 7, key: int = 5, value: int = 4) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    keys = torch.randn(tokens, key, dtype=torch.float64)
    diffs = torch.randn(tokens, value, dtype=torch.float64, requires_grad=True)
    damping = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    return keys, diffs, damping, torch.randn(value, key, dtype=torch.float64)


def _autograd(keys, diffs, damping, shift_grad, preserved=0.0):
    gram = keys.T @ keys + preserved + damping * torch.eye(keys.shape[1], dtype=torch.float64)
    shift = torch.linalg.solve(gram, keys.T @ diffs).T
    (shift * shift_grad).sum().backward()
    return shift.detach(), diffs.grad, damping.grad


@pytest.mark.parametrize("tokens", [1, 3, 7])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_theorems_1_and_2_agree_with_autograd_in_both_forms(tokens: int, form: str) -> None:
    keys, diffs, damping, shift_grad = _problem(tokens)
    shift, diffs_grad, damping_grad = _autograd(keys, diffs, damping, shift_grad)
    rows = diffs.detach()
    solution = NormalEquation.of(keys, rows).solve(0.3) if form == "primal" else DualSolution.of(keys, rows, 0.3)
    pullback = solution.pull_back(shift_grad, keys)
    assert_close(solution.shift, shift, rtol=1e-11, atol=1e-12)
    assert_close(pullback.rows(keys, slice(None)), diffs_grad, rtol=1e-11, atol=1e-12)  # Theorem 1
    assert_close(pullback.rows(keys, slice(1, 2)), diffs_grad[1:2], rtol=1e-11, atol=1e-12)
    assert_close(pullback.damping_grad, damping_grad, rtol=1e-11, atol=1e-12)  # Theorem 2


@pytest.mark.parametrize("tokens", [1, 7])
def test_the_theorems_hold_with_keys_to_preserve(tokens: int) -> None:
    keys, diffs, damping, shift_grad = _problem(tokens)
    others = torch.randn(9, keys.shape[1], dtype=torch.float64)
    preserved = 2.0 * others.T @ others / 9
    shift, diffs_grad, damping_grad = _autograd(keys, diffs, damping, shift_grad, preserved)
    solution = solve_least_squares(keys, diffs.detach(), 0.3, preserved)
    pullback = solution.pull_back(shift_grad, keys)
    assert_close(solution.shift, shift, rtol=1e-11, atol=1e-12)
    assert_close(pullback.rows(keys, slice(None)), diffs_grad, rtol=1e-11, atol=1e-12)
    assert_close(pullback.damping_grad, damping_grad, rtol=1e-11, atol=1e-12)


def test_keys_to_preserve_are_tokens_that_wish_for_nothing() -> None:
    """w E‖Su‖² over nine keys is nine more rows, √(w/9) u, that are to change by zero; by the dual form."""
    keys, diffs, _, _ = _problem(3)
    others = torch.randn(9, keys.shape[1], dtype=torch.float64)
    rows = torch.cat((keys, (2.0 / 9) ** 0.5 * others))
    wishes = torch.cat((diffs.detach(), torch.zeros(9, diffs.shape[1], dtype=torch.float64)))
    found = solve_least_squares(keys, diffs.detach(), 0.3, 2.0 * others.T @ others / 9).shift
    assert_close(found, DualSolution.of(rows, wishes, 0.3).shift, rtol=1e-11, atol=1e-12)


def test_the_dual_is_chosen_exactly_when_there_are_fewer_tokens_than_key_dimensions() -> None:
    for tokens, expected in ((4, DualSolution), (5, PrimalSolution), (6, PrimalSolution)):
        keys, diffs, _, _ = _problem(tokens, key=5)
        assert type(solve_least_squares(keys, diffs.detach(), 0.1)) is expected


def test_equations_of_shards_add_to_the_equation_of_all() -> None:
    keys, diffs, _, _ = _problem(9)
    diffs = diffs.detach()
    whole = NormalEquation.of(keys, diffs)
    parts = NormalEquation.of(keys[:2], diffs[:2]) + NormalEquation.of(keys[2:], diffs[2:])
    assert_close(parts.solve(0.3).shift, whole.solve(0.3).shift, rtol=1e-12, atol=1e-13)


def test_adding_then_removing_tokens_equals_never_having_added_them() -> None:
    keys, diffs, _, _ = _problem(40)
    diffs = diffs.detach()
    kept = NormalEquation.of(keys[:10], diffs[:10])
    guest = NormalEquation.of(keys[10:], diffs[10:])
    assert_close((kept + guest - guest).solve(0.3).shift, kept.solve(0.3).shift, rtol=1e-9, atol=1e-12)


def test_float32_rows_are_solved_in_float64() -> None:
    keys, diffs, _, shift_grad = _problem(3)
    solution = solve_least_squares(keys.float(), diffs.detach().float(), 0.3)
    assert solution.shift.dtype == torch.float64
    pullback = solution.pull_back(shift_grad.float(), keys.float())
    assert pullback.rows(keys.float(), slice(None)).dtype == torch.float64


def test_a_singular_gram_without_damping_is_a_clear_error() -> None:
    keys, diffs, _, _ = _problem(4)
    twice = torch.cat((keys, keys))
    with pytest.raises(EditError, match="not positive definite"):
        solve_least_squares(twice[:2].repeat(2, 1), diffs.detach(), 0.0)
    with pytest.raises(EditError, match="not positive definite"):
        NormalEquation.of(keys, diffs.detach()).solve(0.0)


def test_removing_what_was_never_added_is_a_clear_error() -> None:
    keys, diffs, _, _ = _problem(9)
    equation = NormalEquation.of(keys[:2], diffs.detach()[:2]) - NormalEquation.of(keys[2:], diffs.detach()[2:])
    with pytest.raises(EditError, match="not positive definite"):
        equation.solve(0.01)


def test_values_that_are_not_finite_are_a_clear_error() -> None:
    keys, diffs, _, _ = _problem(3)
    keys[0, 0] = float("nan")
    with pytest.raises(EditError, match="not finite"):
        solve_least_squares(keys, diffs.detach(), 1.0)


def test_dual_without_damping_interpolates_independent_keys() -> None:
    keys, diffs, _, _ = _problem(3)
    solution = solve_least_squares(keys, diffs.detach(), 0.0)
    assert_close(keys @ solution.shift.T, diffs.detach(), rtol=1e-9, atol=1e-10)

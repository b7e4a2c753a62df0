"""Keys to preserve: the small form, the large one and autograd through the formula are the same, gradients included."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from malmen.errors import EditError
from malmen.least_squares import (
    DualSolution,
    NormalEquation,
    PreservingSolution,
    PrimalSolution,
    Pullback,
    Solution,
    solve_least_squares,
)
from malmen.preserved import Preserved, TermMoments

KEY, VALUE, DAMPING, WEIGHT = 12, 8, 0.3, 2.0
WEIGHTS = [WEIGHT, 0.7, 3.0]  # of up to three terms
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Problem(NamedTuple):
    keys: Tensor  # (tokens, KEY)
    diffs: Tensor  # (tokens, VALUE)
    moments: list[Tensor]  # (KEY, KEY) of each term
    shift_grad: Tensor  # (VALUE, KEY)

    def preserved(self, null_space: float | None = None, weight: float = WEIGHT) -> Preserved:
        """Its terms; the first one has this weight, and `null_space` is for the first one."""
        return Preserved(TermMoments(self.moments, null_space), [weight, *WEIGHTS[1 : len(self.moments)]])


def _problem(tokens: int, others: int = 30, terms: int = 1) -> Problem:
    draw = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    moments = [rows.T @ rows / others for rows in (normal(others, KEY) for _ in range(terms))]
    return Problem(normal(tokens, KEY), normal(tokens, VALUE), moments, normal(VALUE, KEY))


def _autograd(problem: Problem, basis: Tensor | None = None) -> dict[str, Tensor]:
    """All that a solution gives, from the formula; `basis` (KEY, kept) is what S is confined to."""
    basis = torch.eye(KEY, dtype=torch.float64) if basis is None else basis
    keys, diffs, moments, shift_grad = problem
    diffs = diffs.clone().requires_grad_()
    log_damping, *log_weights = (
        torch.tensor(of, dtype=torch.float64).log().requires_grad_() for of in (DAMPING, *WEIGHTS[: len(moments)])
    )
    gram = keys.T @ keys + log_damping.exp() * torch.eye(KEY, dtype=torch.float64)
    gram = gram + sum(log_weight.exp() * moment for log_weight, moment in zip(log_weights, moments, strict=True))
    shift = torch.linalg.solve(basis.T @ gram @ basis, basis.T @ keys.T @ diffs).T @ basis.T
    grads = torch.autograd.grad((shift * shift_grad).sum(), (diffs, log_damping, *log_weights))
    names = ["shift", "diffs", "log_damping", *(f"log_weight {term}" for term in range(len(moments)))]
    return dict(zip(names, (shift.detach(), *grads), strict=True))


def _forms(problem: Problem, preserved: Preserved) -> list[Solution]:
    keys, diffs, _, _ = problem
    return [
        NormalEquation.of(keys, diffs).solve(DAMPING, preserved),
        PreservingSolution.of(keys, diffs, DAMPING, preserved),
    ]


def _found(solution: Solution, problem: Problem, preserved: Preserved) -> dict[str, Tensor]:
    pullback: Pullback = solution.pull_back(problem.shift_grad, problem.keys)
    return {
        "shift": solution.shift,
        "diffs": pullback.rows(problem.keys, slice(None)),
        "log_damping": DAMPING * pullback.damping_grad,
    } | {f"log_weight {term}": grad for term, grad in enumerate(pullback.weight_grads(solution.shift, preserved))}


@pytest.mark.parametrize("tokens", [1, 5, 12, 20])
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_both_forms_and_all_their_gradients_are_autograds(tokens: int, terms: int) -> None:
    problem = _problem(tokens, terms=terms)
    preserved, expected = problem.preserved(), _autograd(problem)
    for solution in _forms(problem, preserved):
        assert_close(_found(solution, problem, preserved), expected, **EXACT)
        rows = solution.pull_back(problem.shift_grad, problem.keys).rows(problem.keys, slice(0, 1))
        assert_close(rows, expected["diffs"][:1], **EXACT)


def test_a_moment_of_few_keys_is_singular_and_the_forms_agree_all_the_same() -> None:
    problem = _problem(5, others=3)
    preserved, expected = problem.preserved(), _autograd(problem)
    for solution in _forms(problem, preserved):
        assert_close(_found(solution, problem, preserved), expected, **EXACT)


def test_keys_to_preserve_are_tokens_that_wish_for_nothing() -> None:
    """w E‖Su‖² over nine keys is nine more rows, √(w/9) u, that are to change by zero; by the plain dual form."""
    problem, others = _problem(3), torch.randn(9, KEY, dtype=torch.float64)
    rows = torch.cat((problem.keys, (WEIGHT / 9) ** 0.5 * others))
    wishes = torch.cat((problem.diffs, torch.zeros(9, VALUE, dtype=torch.float64)))
    for solution in _forms(problem, Preserved(TermMoments([others.T @ others / 9]), [WEIGHT])):
        assert_close(solution.shift, DualSolution.of(rows, wishes, DAMPING).shift, **EXACT)


def test_the_small_form_is_chosen_where_tokens_are_few_and_there_is_damping() -> None:
    for tokens, damping, expected in (
        (5, DAMPING, PreservingSolution),
        (6, DAMPING, PrimalSolution),
        (5, 0.0, PrimalSolution),
    ):
        problem = _problem(tokens)
        preserved = problem.preserved()
        assert type(solve_least_squares(problem.keys, problem.diffs, damping, preserved)) is expected


def test_a_factor_is_kept_for_the_same_damping_and_weight_only() -> None:
    problem = _problem(4)
    moments = TermMoments(problem.moments)
    first = moments.metric(DAMPING, [WEIGHT], keep=True)
    assert moments.metric(DAMPING, [WEIGHT], keep=True) is first
    assert not torch.equal(moments.metric(DAMPING, [3.0], keep=True).factor, first.factor)
    again = moments.metric(DAMPING, [WEIGHT], keep=False)
    assert again is not first and torch.equal(again.factor, first.factor)
    assert moments.metric(DAMPING, [WEIGHT], keep=False) is not again


def test_values_that_are_not_finite_are_a_clear_error() -> None:
    problem = _problem(3)
    problem.keys[0, 0] = torch.nan
    with pytest.raises(EditError, match="not finite"):
        solve_least_squares(problem.keys, problem.diffs, DAMPING, problem.preserved())


# --- the null space ---


@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("weight", [WEIGHT, 0.0])
@pytest.mark.parametrize("terms", [1, 2])
def test_confined_shifts_and_all_their_gradients_are_autograds(tokens: int, weight: float, terms: int) -> None:
    problem = _problem(tokens, terms=terms)
    values, vectors = torch.linalg.eigh(problem.moments[0])
    basis = vectors[:, values < 0.6 * values.mean()]
    assert 2 < basis.shape[1] < KEY - 2
    preserved = problem.preserved(0.6, weight)
    without = problem._replace(moments=[torch.zeros_like(problem.moments[0]), *problem.moments[1:]])
    expected = _autograd(problem if weight else without, basis)
    for solution in _forms(problem, preserved):
        found = _found(solution, problem, preserved)
        assert_close(found, expected, **EXACT)
        assert_close(found["shift"] @ (torch.eye(KEY) - basis @ basis.T), 0 * found["shift"], **EXACT)


def test_keys_in_the_span_of_what_is_preserved_stay_as_they_are() -> None:
    """Four keys to preserve leave eight dimensions free; no token can move their outputs."""
    problem, others = _problem(5), torch.randn(4, KEY, dtype=torch.float64)
    for solution in _forms(problem, Preserved(TermMoments([others.T @ others / 4], 1e-9), [0.0])):
        assert solution.shift.norm() > 0.1
        assert_close(solution.shift @ others.T, torch.zeros(VALUE, 4, dtype=torch.float64), **EXACT)


def test_a_threshold_above_all_eigenvalues_confines_nothing() -> None:
    problem = _problem(5)
    expected = _autograd(problem)
    preserved = problem.preserved(1e3)
    for solution in _forms(problem, preserved):
        assert_close(_found(solution, problem, preserved), expected, **EXACT)


def test_a_null_space_without_eigenvectors_is_a_clear_error() -> None:
    problem = _problem(3)
    preserved = problem.preserved(1e-6)
    with pytest.raises(
        EditError, match=r"below editor\.preserved_null_space=1e-06 times .* smallest of 12 is 0\.\d+ times"
    ):
        solve_least_squares(problem.keys, problem.diffs, DAMPING, preserved)

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from malmen.config import load_config
from malmen.editor import seeded_editor
from malmen.errors import EditError
from malmen.least_squares import DualSolution, NormalEquation, PrimalSolution, solve_least_squares
from malmen.lm.devices import slices_products
from malmen.lm.layers import LayerSpec
from malmen.lm.trace import LayerTrace


def _problem(tokens: int = 7, key: int = 5, value: int = 4) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    keys = torch.randn(tokens, key, dtype=torch.float64)
    diffs = torch.randn(tokens, value, dtype=torch.float64, requires_grad=True)
    damping = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    return keys, diffs, damping, torch.randn(value, key, dtype=torch.float64)


def _autograd(keys, diffs, damping, shift_grad):
    gram = keys.T @ keys + damping * torch.eye(keys.shape[1], dtype=torch.float64)
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


# --- sliced products ---


def _rows(count: int, size: int, kind: str) -> Tensor:
    """float32 rows as an LM has them: alike, with a few large features, or in a subspace that fades out."""
    torch.manual_seed(1)
    rows = torch.randn(count, size)
    if kind == "outliers":
        rows[:, :3] *= 300
    if kind == "fading":
        rows = rows @ torch.logspace(0, -5, size).diag() @ torch.linalg.qr(torch.randn(size, size))[0]
    return rows


@pytest.mark.parametrize("kind", ["alike", "outliers", "fading"])
@pytest.mark.parametrize("count", [0, 1, 3000])
def test_a_sliced_product_is_exact_for_rows_within_the_stated_bound(kind: str, count: int) -> None:
    keys, diffs = _rows(count, 40, kind), 1e-6 * _rows(count, 24, "alike")
    sliced, exact = NormalEquation.of(keys, diffs, sliced=True), NormalEquation.of(keys, diffs)
    largest = [rows.double().abs().amax(0) if count else torch.zeros(rows.shape[1]).double() for rows in (keys, diffs)]
    bound = 2.1 * count * 2.0**-31  # of two factors, each off by 2⁻³¹ of its column's largest
    assert bool(((sliced.gram - exact.gram).abs() <= bound * torch.outer(largest[0], largest[0])).all())
    assert bool(((sliced.cross - exact.cross).abs() <= bound * torch.outer(largest[1], largest[0])).all())


def test_bfloat16_rows_of_one_size_lose_nothing() -> None:
    keys = _rows(2000, 16, "alike").clamp(-4, 4).bfloat16()
    keys[keys.abs() < 2**-10] = 0  # 31 bits below the largest hold the 8 of all others
    assert torch.equal(NormalEquation.of(keys, keys, sliced=True).gram, NormalEquation.of(keys, keys).gram)


def test_a_column_of_any_size_is_scaled_without_overflow() -> None:
    keys = _rows(50, 4, "alike") * torch.tensor([3e38 / 5, 1.0, 1e-30, 0.0])
    found, expected = NormalEquation.of(keys, keys, sliced=True).gram, NormalEquation.of(keys, keys).gram
    assert_close(found, expected, rtol=1e-7, atol=0)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", [100, 3000])  # the dual and the primal form
def test_sliced_products_solve_what_plain_float32_cannot(tokens: int) -> None:
    """An ill-conditioned gram: float32 sums are off by more than λ, in chunks added up in float64 too. Sliced ones are
    off by less than the rounding of the keys themselves."""
    keys, diffs, damping = _rows(tokens, 256, "fading"), _rows(tokens, 8, "alike"), 1e-9 * tokens
    expected = solve_least_squares(keys, diffs, damping)
    sliced = solve_least_squares(keys, diffs, damping, sliced=True)
    wobble = 1 + 2.0**-24 * (2 * torch.rand(keys.shape, dtype=torch.float64) - 1)  # as float32 rounds
    rounding = _error(solve_least_squares(keys.double() * wobble, diffs, damping).shift, expected.shift)
    assert _error(sliced.shift, expected.shift) < rounding
    shift_grad = torch.randn(8, 256, dtype=torch.float64)
    pulled = [solution.pull_back(shift_grad, keys).rows(keys, slice(None)) for solution in (sliced, expected)]
    assert _error(*pulled) < 10 * rounding
    if tokens > 256:
        parts = list(zip(keys.split(256), diffs.split(256), strict=True))
        gram = sum((part.T @ part).double() for part, _ in parts)
        cross = sum((diff.T @ part).double() for part, diff in parts)
        assert isinstance(gram, Tensor) and isinstance(cross, Tensor)
        with pytest.raises(EditError, match="not positive definite"):
            NormalEquation(gram, cross).solve(damping)


def test_rows_in_float64_are_never_sliced() -> None:
    """They stop at 31 bits. The setting leaves float64 rows alone."""
    assert not slices_products("sliced", torch.ones(1, dtype=torch.float64))
    assert slices_products("sliced", torch.ones(1)) and not slices_products("float64", torch.ones(1))
    assert not slices_products("auto", torch.ones(1))  # on a CPU


@pytest.mark.parametrize(("card", "sliced"), [("NVIDIA A10G", True), ("NVIDIA H100 PCIe", False), ("NVIDIA X9", False)])
def test_auto_slices_on_cards_that_are_slow_in_float64(
    card: str, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: card)
    rows = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    assert slices_products("auto", rows) is sliced  # type: ignore[arg-type]


def test_what_is_not_finite_is_refused_in_slices_too() -> None:
    keys = _rows(30, 8, "alike")
    keys[3, 2] = torch.inf
    with pytest.raises(EditError, match="not finite"):
        solve_least_squares(keys, _rows(30, 4, "alike"), 1.0, sliced=True)


def test_an_editors_shifts_and_gradients_do_not_depend_on_the_setting() -> None:
    layer, shifts, grads = LayerSpec("layer", 48, 12, "decoder"), [], []
    trace = LayerTrace(_rows(200, 48, "outliers"), 1e-3 * _rows(200, 12, "alike"))
    shift_grad = _rows(12, 48, "alike")
    for products in ("float64", "sliced"):
        config = load_config(None, [f"editor.products={products}", "rank=8", "edit_lr=1", "model.dtype=float32"])
        editor = seeded_editor([layer], config)
        editor.observe({"layer": trace})
        solved = editor.solve({"layer": trace}, training=True)
        editor.backward(solved, {"layer": shift_grad})
        shifts.append(solved.shifts["layer"])
        grads.append(torch.cat([value.grad.flatten() for value in editor.parameters() if value.grad is not None]))
    assert 0 < _error(shifts[1], shifts[0]) < 1e-7 and _error(grads[1], grads[0]) < 1e-6

"""The normal equation of §4.1: many wanted changes of a layer's output, merged into one shift.

    min_S ‖SU − D‖² + λ‖S‖²   ⇒   S* = DUᵀ(UUᵀ + λI)⁻¹ = D(UᵀU + λI)⁻¹Uᵀ

The first form factorises a (key, key) matrix, the second a (token, token) matrix; they are equal and
the smaller one is used. Either way one Cholesky factor in float64 serves S*, the pullback of its
gradient (Theorem 1) and dL/dλ (Theorem 2). Rows are tokens: `keys` is Uᵀ and `value_diffs` is Dᵀ.

Products are formed in float64, or `sliced`: in float32 without a rounding error, for GPUs that are slow in float64.

Beyond the paper, keys whose outputs are to stay as they are may be named by their second moment C = E[uuᵀ]: then
w E‖Su‖² joins the sum, and UUᵀ + wC stands for UUᵀ everywhere above. `preserved` is wC; with it the first form is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from malmen.errors import EditError

ROWS_AT_ONCE = 8192  # bounds the float64 copies of rows
_SLICES, _BITS = 4, 8
_EXACT_ROWS = 2 ** (24 - 2 * (_BITS - 1))  # so many products of numbers up to 2⁷ add up in float32 without rounding


@dataclass(frozen=True)
class NormalEquation:
    """The sums over tokens that determine S*: shards and sets of edits add and subtract."""

    gram: Tensor  # UUᵀ (key, key)
    cross: Tensor  # DUᵀ (value, key)

    @classmethod
    def of(cls, keys: Tensor, value_diffs: Tensor, *, sliced: bool = False) -> NormalEquation:
        """The equation of these tokens; keys (tokens, key), value_diffs (tokens, value)."""
        assert keys.shape[0] == value_diffs.shape[0], (keys.shape, value_diffs.shape)
        if sliced:
            return cls(_sliced_product(keys, keys), _sliced_product(value_diffs, keys))
        gram = keys.new_zeros(keys.shape[1], keys.shape[1], dtype=torch.float64)
        cross = keys.new_zeros(value_diffs.shape[1], keys.shape[1], dtype=torch.float64)
        for key_rows, diff_rows in zip(keys.split(ROWS_AT_ONCE), value_diffs.split(ROWS_AT_ONCE), strict=True):
            rows = key_rows.double()
            gram.addmm_(rows.T, rows)
            cross.addmm_(diff_rows.double().T, rows)
        return cls(gram, cross)

    def __add__(self, other: NormalEquation) -> NormalEquation:
        return NormalEquation(self.gram + other.gram, self.cross + other.cross)

    def __sub__(self, other: NormalEquation) -> NormalEquation:
        return NormalEquation(self.gram - other.gram, self.cross - other.cross)

    def solve(self, damping: float, preserved: Tensor | None = None) -> PrimalSolution:
        """S* by a (key, key) factorisation."""
        factor = _cholesky(self.gram if preserved is None else self.gram + preserved, damping)
        return PrimalSolution(torch.cholesky_solve(self.cross.T, factor).T, factor)


@dataclass(frozen=True)
class Pullback:
    """How a gradient of S* reaches the tokens; rows are formed when asked for, because there may be many."""

    damping_grad: Tensor  # dL/dλ
    pullback: Tensor | None = None  # M (value, key), from the primal form
    diffs_grad: Tensor | None = None  # ∇_D L (tokens, value), from the dual form

    def rows(self, keys: Tensor, rows: slice) -> Tensor:
        """∇_D L = MU of these tokens (rows, value)."""
        if self.diffs_grad is not None:
            return self.diffs_grad[rows]
        assert self.pullback is not None
        return keys[rows].double() @ self.pullback.T


@dataclass(frozen=True)
class PrimalSolution:
    """S* and the factor of UUᵀ + λI (+ wC)."""

    shift: Tensor  # S* (value, key)
    factor: Tensor  # lower Cholesky factor (key, key)

    def pull_back(self, shift_grad: Tensor, _keys: Tensor) -> Pullback:
        """M = ∇_S L (UUᵀ + λI)⁻¹ and dL/dλ = −tr(M S*ᵀ); the same with wC, which depends on neither D nor λ."""
        pullback = torch.cholesky_solve(shift_grad.double().T, self.factor).T
        return Pullback(-(pullback * self.shift).sum(), pullback=pullback)


@dataclass(frozen=True)
class DualSolution:
    """S* and the factor of UᵀU + λI: for fewer tokens than key dimensions."""

    shift: Tensor  # S* (value, key)
    factor: Tensor  # lower Cholesky factor (tokens, tokens)
    weights: Tensor  # (UᵀU + λI)⁻¹Dᵀ (tokens, value); S* = weightsᵀ keys

    @classmethod
    def of(cls, keys: Tensor, value_diffs: Tensor, damping: float, *, sliced: bool = False) -> DualSolution:
        """S* by a (tokens, tokens) factorisation."""
        rows = keys.double()
        factor = _cholesky(_sliced_product(keys.T, keys.T) if sliced else rows @ rows.T, damping)
        weights = torch.cholesky_solve(value_diffs.double(), factor)
        return cls(weights.T @ rows, factor, weights)

    def pull_back(self, shift_grad: Tensor, keys: Tensor) -> Pullback:
        """∇_D L and dL/dλ; M is never formed (push-through identity)."""
        diffs_grad = torch.cholesky_solve(keys.double() @ shift_grad.double().T, self.factor)
        return Pullback(-(diffs_grad * self.weights).sum(), diffs_grad=diffs_grad)


Solution = PrimalSolution | DualSolution


def solve_least_squares(
    keys: Tensor, value_diffs: Tensor, damping: float, preserved: Tensor | None = None, *, sliced: bool = False
) -> Solution:
    """S* for these tokens, in the cheaper of the two forms."""
    if is_dual(keys.shape[0], keys.shape[1], preserved is not None):
        return DualSolution.of(keys, value_diffs, damping, sliced=sliced)
    return NormalEquation.of(keys, value_diffs, sliced=sliced).solve(damping, preserved)


def is_dual(num_tokens: int, key_size: int, preserving: bool) -> bool:
    """Which form is used: the second where it is smaller, and can be."""
    return num_tokens < key_size and not preserving


def token_residuals(keys: Tensor, shift: Tensor, value_diffs: Tensor) -> Tensor:
    """r of each token, ‖Su − d‖ / ‖d‖ (§5.2): keys (tokens, key), shift (value, key), value_diffs (tokens, value)."""
    missed = keys @ shift.T - value_diffs
    return missed.norm(dim=-1) / value_diffs.norm(dim=-1).clamp(min=torch.finfo(value_diffs.dtype).tiny)


def _sliced_product(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right in float64 (left columns, right columns), by products in float32.

    Each column is cut into integers of 8 bits, whose products add up without rounding. So the result is exact for
    columns that differ from the given ones by at most 2⁻³¹ of their largest entry, 1/128 of what float32 rounds there:
    a gram remains a gram. Plain float32 has no such bound; where the gram is ill-conditioned its error exceeds λ.
    """
    symmetric = left is right
    left_exponent = _exponents(left)
    right_exponent = left_exponent if symmetric else _exponents(right)
    total = left.new_zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for left_rows, right_rows in zip(left.split(_EXACT_ROWS), right.split(_EXACT_ROWS), strict=True):
        left_parts = _slices(left_rows, left_exponent)
        right_parts = left_parts if symmetric else _slices(right_rows, right_exponent)
        for i, left_part in enumerate(left_parts):
            for j, right_part in enumerate(right_parts[i:] if symmetric else right_parts, i if symmetric else 0):
                product, weight = left_part.T @ right_part, 2.0 ** (-_BITS * (i + j))
                total.add_(product, alpha=weight)
                if symmetric and j > i:
                    total.add_(product.T, alpha=weight)
    return torch.ldexp(torch.ldexp(total, left_exponent[:, None]), right_exponent)


def _exponents(rows: Tensor) -> Tensor:
    """The scale of each column, as a power of 2 by which its largest entry becomes 2⁷ at most."""
    largest = torch.maximum(rows.amax(0), -rows.amin(0)) if len(rows) else rows.new_zeros(rows.shape[1])
    return largest.float().frexp().exponent.clamp(min=-100) - (_BITS - 1)  # smaller columns are as good as zero


def _slices(rows: Tensor, exponents: Tensor) -> list[Tensor]:
    """Integers up to 2⁷, the largest parts first: rows = 2^exponents · Σ partᵢ 2⁻⁸ⁱ."""
    rest, parts = torch.ldexp(rows.float(), -exponents), []
    for _ in range(_SLICES):
        parts.append(rest.round())
        rest = (rest - parts[-1]) * 2**_BITS
    return parts


def _cholesky(gram: Tensor, damping: float) -> Tensor:
    damped = gram.clone()
    damped.diagonal().add_(damping)
    if not bool(torch.isfinite(damped).all()):
        raise EditError("the normal equation holds values that are not finite: look at the keys and their gradients")
    factor, failed_at = torch.linalg.cholesky_ex(damped)
    pivots = factor.diagonal().square()
    # A singular matrix can pass by rounding alone; its last pivots are then rounding errors.
    noise = gram.shape[0] * torch.finfo(torch.float64).eps * damped.diagonal().max()
    if int(failed_at) > 0 or bool(pivots.min() <= noise):
        raise EditError(
            f"the normal equation's {tuple(gram.shape)} matrix with damping {damping:.3g} is not positive definite: "
            "some keys repeat or depend on each other, or facts were removed that were not in the set; "
            "a larger damping helps against the former"
        )
    return factor

"""The normal equation of §4.1: many wanted changes of a layer's output, merged into one shift.

    min_S ‖SU − D‖² + λ‖S‖²   ⇒   S* = DUᵀ(UUᵀ + λI)⁻¹ = D(UᵀU + λI)⁻¹Uᵀ

The first form factorises a (key, key) matrix, the second a (token, token) matrix; they are equal and
the smaller one is used. Either way one Cholesky factor in float64 serves S*, the pullback of its
gradient (Theorem 1) and dL/dλ (Theorem 2). Rows are tokens: `keys` is Uᵀ and `value_diffs` is Dᵀ.

Products are formed in float64, or `sliced`: in float32 without a rounding error, for GPUs that are slow in float64.

Beyond the paper, keys whose outputs are to stay as they are may be named by second moments C = E[uuᵀ] with weights w
(preserved.py): then A = λI + Σ wC stands for λI everywhere above, and the second form reads
S* = D(I + UᵀA⁻¹U)⁻¹UᵀA⁻¹. A is factorised apart from the tokens, so a solve with the same λ and w costs a few
(token, token) and (token, key) operations only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from malmen.errors import EditError

if TYPE_CHECKING:  # preserved.py factorises with this module
    from malmen.preserved import Metric, Preserved

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

    def solve(self, damping: float, preserved: Preserved | None = None) -> PrimalSolution:
        """S* by a (key, key) factorisation; confined to a null space, by one of its size."""
        vectors = None if preserved is None else preserved.vectors
        gram = self.gram if vectors is None else vectors.T @ self.gram @ vectors
        factor = cholesky(gram if preserved is None else gram + preserved.gram(), damping)
        return PrimalSolution(_solve_within(self.cross, factor, vectors), factor, vectors)


@dataclass(frozen=True)
class Pullback:
    """How a gradient of S* reaches the tokens; rows are formed when asked for, because there may be many."""

    damping_grad: Tensor  # dL/dλ
    pullback: Tensor | None = None  # M (value, key), from the primal form
    diffs_grad: Tensor | None = None  # ∇_D L (tokens, value), from the dual forms
    scaling_grads: Sequence[Tensor] = ()  # dL/d log w of each term, from the dual form

    def rows(self, keys: Tensor, rows: slice) -> Tensor:
        """∇_D L = MU of these tokens (rows, value)."""
        if self.diffs_grad is not None:
            return self.diffs_grad[rows]
        assert self.pullback is not None
        return keys[rows].double() @ self.pullback.T

    def weight_grads(self, shift: Tensor, preserved: Preserved) -> Sequence[Tensor]:
        """dL/d log w = −tr(M wC S*ᵀ) of each term; shift S* (value, key)."""
        if self.pullback is None:
            return self.scaling_grads
        return [-(self.pullback * preserved.scaled(term, shift)).sum() for term in range(len(preserved.weights))]


@dataclass(frozen=True)
class PrimalSolution:
    """S* and the factor of UUᵀ + λI (+ wC), confined to `vectors` if there are any."""

    shift: Tensor  # S* (value, key)
    factor: Tensor  # lower Cholesky factor (key, key)
    vectors: Tensor | None = None  # Û (key, kept)

    def pull_back(self, shift_grad: Tensor, _keys: Tensor) -> Pullback:
        """M = ∇_S L (UUᵀ + λI)⁻¹ and dL/dλ = −tr(M S*ᵀ); the same with wC, which depends on neither D nor λ."""
        pullback = _solve_within(shift_grad.double(), self.factor, self.vectors)
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
        factor = cholesky(_sliced_product(keys.T, keys.T) if sliced else rows @ rows.T, damping)
        weights = torch.cholesky_solve(value_diffs.double(), factor)
        return cls(weights.T @ rows, factor, weights)

    def pull_back(self, shift_grad: Tensor, keys: Tensor) -> Pullback:
        """∇_D L and dL/dλ; M is never formed (push-through identity)."""
        diffs_grad = torch.cholesky_solve(keys.double() @ shift_grad.double().T, self.factor)
        return Pullback(-(diffs_grad * self.weights).sum(), diffs_grad=diffs_grad)


@dataclass(frozen=True)
class PreservingSolution:
    """S* and the factor of I + UᵀA⁺U: the dual form with keys to preserve."""

    shift: Tensor  # S* (value, key)
    factor: Tensor  # lower Cholesky factor (tokens, tokens)
    weights: Tensor  # (I + UᵀA⁺U)⁻¹Dᵀ (tokens, value); S* = weightsᵀ spread
    spread: Tensor  # UᵀA⁺ (tokens, key)
    metric: Metric
    damping: float
    preserved: Preserved

    @classmethod
    def of(cls, keys: Tensor, value_diffs: Tensor, damping: float, preserved: Preserved) -> PreservingSolution:
        """S* by a (tokens, tokens) factorisation, and one of A unless that is known."""
        metric = preserved.metric(damping)
        whitened = metric.whiten(keys.double())
        factor = cholesky(whitened @ whitened.T, 1.0)
        weights, spread = torch.cholesky_solve(value_diffs.double(), factor), metric.colour(whitened)
        return cls(weights.T @ spread, factor, weights, spread, metric, damping, preserved)

    def pull_back(self, shift_grad: Tensor, _keys: Tensor) -> Pullback:
        """∇_D L, dL/dλ and the gradients of all w.

        λ dL/dλ + Σ w dL/dw = −tr(MAS*ᵀ), from which the last of them follows; S*ᵀ = A⁺U weights.
        """
        grad = shift_grad.double()
        diffs_grad = torch.cholesky_solve(self.spread @ grad.T, self.factor)
        damping_grad = self._moment_grad(self.spread, grad, diffs_grad)
        grads = [
            self._moment_grad(self.preserved.scaled(term, self.spread), grad, diffs_grad)
            for term in range(len(self.preserved.weights) - 1)
        ]
        last = -(diffs_grad * self.weights).sum() - self.damping * damping_grad - sum(grads)
        return Pullback(damping_grad, diffs_grad=diffs_grad, scaling_grads=[*grads, last])

    def _moment_grad(self, scaled: Tensor, grad: Tensor, diffs_grad: Tensor) -> Tensor:
        """−tr(MCS*ᵀ), with MCA⁺U = ∇_S L A⁺CA⁺U − (∇_D L)ᵀUᵀA⁺CA⁺U; `scaled` is UᵀA⁺C (tokens, key)."""
        again = self.metric.colour(self.metric.whiten(scaled))
        moved = again @ grad.T - (scaled @ self.spread.T) @ diffs_grad
        return -(moved * self.weights).sum()


SmallSolution = DualSolution | PreservingSolution
Solution = PrimalSolution | SmallSolution


def solve_least_squares(
    keys: Tensor, value_diffs: Tensor, damping: float, preserved: Preserved | None = None, *, sliced: bool = False
) -> Solution:
    """S* for these tokens, in the cheaper of the two forms."""
    sizes = keys.shape[1], value_diffs.shape[1]
    if is_dual(keys.shape[0], *sizes, preserving=preserved is not None, damped=bool(damping > 0)):
        return solve_dual(keys, value_diffs, damping, preserved, sliced=sliced)
    return NormalEquation.of(keys, value_diffs, sliced=sliced).solve(damping, preserved)


def solve_dual(
    keys: Tensor, value_diffs: Tensor, damping: float, preserved: Preserved | None, *, sliced: bool
) -> SmallSolution:
    """S* in the second form. Whitened keys are not sliced: their products are few, and not of float32 rows."""
    if preserved is None:
        return DualSolution.of(keys, value_diffs, damping, sliced=sliced)
    return PreservingSolution.of(keys, value_diffs, damping, preserved)


def is_dual(num_tokens: int, key_size: int, value_size: int, *, preserving: bool, damped: bool = True) -> bool:
    """Which form is used: the second where it is cheaper, and can be.

    With keys to preserve it passes A's factor over the tokens' keys as often as the first form passes its own over the
    values, and A needs a λ above 0.
    """
    if preserving:
        return damped and num_tokens < min(key_size // 2, value_size)
    return num_tokens < key_size


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


def _solve_within(rows: Tensor, factor: Tensor, vectors: Tensor | None) -> Tensor:
    """Rows times the inverse of the factorised matrix (rows, key), which may be confined to vectors."""
    if vectors is None:
        return torch.cholesky_solve(rows.T, factor).T
    return torch.cholesky_solve((rows @ vectors).T, factor).T @ vectors.T


def cholesky(gram: Tensor, damping: float) -> Tensor:
    """The lower factor of gram + λI in float64; EditError where that is not positive definite."""
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

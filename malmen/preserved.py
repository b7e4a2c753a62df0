"""What an edit is to leave alone, beyond the paper: terms Σᵢ wᵢ E‖Su‖² over keys u that join the least squares.

With Cᵢ = E[uuᵀ], A = λI + Σᵢ wᵢCᵢ stands where λI stood. In the null space of C₁, S is confined to its eigenvectors Û
with small eigenvalues, S = XÛᵀ, and the inverse of A is taken within them: A⁺ = Û(Ûᵀ A Û)⁻¹Ûᵀ. The moments Cᵢ do not
change while an editor is trained or used, so what follows from them alone is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from malmen.errors import EditError
from malmen.least_squares import cholesky


@dataclass(frozen=True)
class Metric:
    """A = LLᵀ over all keys, or within the vectors Û that S is confined to."""

    factor: Tensor  # L (key, key) or (kept, kept)
    vectors: Tensor | None = None  # Û (key, kept)

    def whiten(self, rows: Tensor) -> Tensor:
        """Z = KL⁻ᵀ (tokens, key or kept): ZZᵀ = KA⁺Kᵀ."""
        rows = rows if self.vectors is None else rows @ self.vectors
        return torch.linalg.solve_triangular(self.factor.mT, rows, upper=True, left=False)

    def colour(self, whitened: Tensor) -> Tensor:
        """ZL⁻¹ (tokens, key): of a whitened K, KA⁺."""
        rows = torch.linalg.solve_triangular(self.factor, whitened, upper=False, left=False)
        return rows if self.vectors is None else rows @ self.vectors.T


class TermMoments:
    """C₁, C₂, … of one layer, and what follows from them."""

    def __init__(self, moments: Sequence[Tensor], null_space: float | None = None) -> None:
        """`moments` (key, key) each; `null_space` the threshold for C₁, in units of its mean eigenvalue."""
        self.moments, self.threshold = list(moments), null_space
        self._kept: tuple[tuple[float, ...], Metric] | None = None  # by λ and the weights

    @cached_property
    def vectors(self) -> Tensor | None:
        """Û (key, kept), the eigenvectors of C₁ that S is confined to; None: S may be anything."""
        if self.threshold is None:
            return None
        values, vectors = torch.linalg.eigh(self.moments[0].double())
        mean = values.mean()
        kept = len(values) - int((values >= self.threshold * mean).sum())  # they ascend
        if kept == 0:
            raise EditError(
                f"no eigenvector of the preserved keys' moment is below editor.preserved_null_space={self.threshold:g} "
                f"times the "
                f"mean eigenvalue: the smallest of {len(values)} is {float(values[0] / mean):.3g} times the mean"
            )
        return vectors[:, :kept].clone()  # a copy lets go of the other eigenvectors

    def gram(self, weights: Sequence[float]) -> Tensor:
        """Σ wᵢCᵢ (key, key); confined, Ûᵀ(Σ wᵢCᵢ)Û (kept, kept)."""
        total = sum(
            (weight * moment.double() for weight, moment in zip(weights, self.moments, strict=True)),
            start=self.moments[0].new_zeros((), dtype=torch.float64),
        )
        return total if self.vectors is None else self.vectors.T @ total @ self.vectors

    def metric(self, damping: float, weights: Sequence[float], *, keep: bool) -> Metric:
        """The metric of A; the last one is kept where λ and the weights stay as they are."""
        known = (damping, *weights)
        if keep and self._kept is not None and self._kept[0] == known:
            return self._kept[1]
        self._kept = None  # before another is made
        metric = Metric(cholesky(self.gram(weights), damping), self.vectors)
        if keep:
            self._kept = (known, metric)
        return metric


@dataclass(frozen=True)
class Preserved:
    """The terms of one solve."""

    moments: TermMoments
    weights: Sequence[float]  # wᵢ
    keep: bool = False  # whether solves with the same λ and weights follow, so that A's factor is worth its memory

    @property
    def vectors(self) -> Tensor | None:
        """Û (key, kept) that S is confined to; None: anything."""
        return self.moments.vectors

    def gram(self) -> Tensor:
        """Σ wᵢCᵢ (key, key); confined (kept, kept)."""
        return self.moments.gram(self.weights)

    def metric(self, damping: float) -> Metric:
        """A or, confined, A⁺; λ is above 0."""
        return self.moments.metric(damping, self.weights, keep=self.keep)

    def scaled(self, term: int, rows: Tensor) -> Tensor:
        """Rows times wᵢCᵢ (rows, key)."""
        return self.weights[term] * (rows @ self.moments.moments[term].double())

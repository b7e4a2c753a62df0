"""What is to stay as it is: the keys u whose outputs an edit leaves alone, by their second moment C = E[uuᵀ].

w E‖Su‖² joins the least squares, so A = λI + wC stands where λI stood. In the null space, S is confined to the
eigenvectors Û of C with small eigenvalues, S = XÛᵀ, and the inverse of A is taken within them: A⁺ = Û(λ + wΛ)⁻¹Ûᵀ.
C does not change while an editor is trained or used, so what follows from C alone is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from malmen.errors import EditError
from malmen.least_squares import cholesky


@dataclass(frozen=True)
class CholeskyMetric:
    """A = LLᵀ over all keys."""

    factor: Tensor  # L (key, key)

    def whiten(self, rows: Tensor) -> Tensor:
        """Z = KL⁻ᵀ (tokens, key): ZZᵀ = KA⁻¹Kᵀ."""
        return torch.linalg.solve_triangular(self.factor.mT, rows, upper=True, left=False)

    def colour(self, whitened: Tensor) -> Tensor:
        """ZL⁻¹ (tokens, key): of a whitened K, KA⁻¹."""
        return torch.linalg.solve_triangular(self.factor, whitened, upper=False, left=False)


@dataclass(frozen=True)
class EigenMetric:
    """A in eigenvectors of C, where it is diagonal: all that is confined to them."""

    vectors: Tensor  # Û (key, kept)
    scales: Tensor  # (λ + wΛ)^-½ (kept,)

    def whiten(self, rows: Tensor) -> Tensor:
        """Z (tokens, kept): ZZᵀ = KA⁺Kᵀ."""
        return (rows @ self.vectors) * self.scales

    def colour(self, whitened: Tensor) -> Tensor:
        """Of a whitened K, KA⁺ (tokens, key)."""
        return (whitened * self.scales) @ self.vectors.T


Metric = CholeskyMetric | EigenMetric


class NullSpace(NamedTuple):
    """The eigenvectors of C that S is confined to."""

    vectors: Tensor  # Û (key, kept)
    values: Tensor  # Λ (kept,)


class KeyMoment:
    """C of one layer, and what follows from it."""

    def __init__(self, moment: Tensor, null_space: float | None = None) -> None:
        """`moment` C (key, key); `null_space` the threshold, in units of C's mean eigenvalue."""
        self.moment, self.threshold = moment, null_space
        self._kept: tuple[tuple[float, float], CholeskyMetric] | None = None  # by λ and w

    @cached_property
    def null_space(self) -> NullSpace | None:
        """None: S may be anything."""
        if self.threshold is None:
            return None
        values, vectors = torch.linalg.eigh(self.moment.double())
        mean = values.mean()
        kept = len(values) - int((values >= self.threshold * mean).sum())  # they ascend
        if kept == 0:
            raise EditError(
                f"no eigenvector of the preserved keys' moment is below editor.preserved_null_space={self.threshold:g} "
                f"times the "
                f"mean eigenvalue: the smallest of {len(values)} is {float(values[0] / mean):.3g} times the mean"
            )
        # Rounding makes zeros slightly negative. A copy lets go of the other eigenvectors.
        return NullSpace(vectors[:, :kept].clone(), values[:kept].clamp(min=0))

    def cholesky(self, damping: float, weight: float, *, keep: bool) -> CholeskyMetric:
        """The metric of A; the last one is kept where λ and w stay as they are."""
        if keep and self._kept is not None and self._kept[0] == (damping, weight):
            return self._kept[1]
        self._kept = None  # before another is made
        metric = CholeskyMetric(cholesky(weight * self.moment.double(), damping))
        if keep:
            self._kept = ((damping, weight), metric)
        return metric


@dataclass(frozen=True)
class Preserved:
    """What is to stay in one solve."""

    moment: KeyMoment
    weight: float  # w
    keep: bool = False  # whether solves with the same λ and w follow, so that A's factor is worth its memory

    @property
    def vectors(self) -> Tensor | None:
        """Û (key, kept) that S is confined to; None: anything."""
        space = self.moment.null_space
        return None if space is None else space.vectors

    def gram(self) -> Tensor:
        """wC (key, key); confined, wΛ (kept, kept)."""
        space = self.moment.null_space
        return self.weight * (self.moment.moment.double() if space is None else space.values.diag())

    def metric(self, damping: float) -> Metric:
        """A or, confined, A⁺; λ is above 0."""
        space = self.moment.null_space
        if space is None:
            return self.moment.cholesky(damping, self.weight, keep=self.keep)
        return EigenMetric(space.vectors, (damping + self.weight * space.values).rsqrt())

    def scaled(self, rows: Tensor) -> Tensor:
        """Rows times wC (rows, key)."""
        return self.weight * (rows @ self.moment.moment.double())

"""AlphaEdit: MEMIT's values, with shifts that read only what other keys hardly have (Fang et al., ICLR 2025).

Û are the eigenvectors of the keys' second moment (the mean over tokens) with eigenvalues below a threshold; P = Û Ûᵀ
projects onto them. With the keys K of the subjects, their residuals R and the sum H of K Kᵀ over earlier rounds, each
layer's shift is S = Xᵀ where [P (K Kᵀ + H) + λI] X = P K Rᵀ. So S = S P: a key without a part in these directions keeps
its output exactly.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from malmen.config import AlphaEditConfig, Config
from malmen.errors import EditError
from malmen.lm.model import LanguageModel
from malmen.methods.memit import MemitHistory


class AlphaEdit(MemitHistory):
    """Needs what MEMIT needs; in rounds it keeps the history of keys."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        super().__init__(lm, config)
        self.own = config.baselines.alphaedit
        self._free: dict[str, Tensor] | None = None  # Û of each layer (key, free)
        self._seconds = 0.0

    def prepare(self, lm: LanguageModel) -> float:
        """Compute or read the moments of keys, and compute their eigenvectors."""
        seconds = super().prepare(lm)
        self.free_directions(lm)
        return seconds + self._seconds

    def free_directions(self, lm: LanguageModel) -> dict[str, Tensor]:
        """Û of each layer (key, free), computed once: those of the model before the first round."""
        if self._free is None:
            moments, began = self.moments(lm).by_layer, time.perf_counter()
            free = {}
            for layer in self.layers:
                try:
                    free[layer.name] = smallest_directions(moments[layer.name], self.own)
                except EditError as error:
                    raise EditError(f"layer {layer.name}: {error}") from error
            self._free, self._seconds = free, time.perf_counter() - began
        return self._free

    def layer_shift(self, lm: LanguageModel, layer: str, keys: Tensor, rest: Tensor) -> Tensor:
        """S of a layer (value, key), within the free directions."""
        history = (self.history or {}).get(layer)
        return projected(keys, rest, self.free_directions(lm)[layer], self.own.damping, history)


def smallest_directions(moment: Tensor, settings: AlphaEditConfig) -> Tensor:
    """Û (key, free): eigenvectors of a second moment (key, key), by threshold or by share."""
    values, vectors = torch.linalg.eigh(moment.double())  # from the smallest
    if settings.free_share is not None:
        return vectors[:, : max(1, int(settings.free_share * len(values)))]
    free = int((values < settings.threshold).sum())
    if free == 0:
        raise EditError(
            f"no eigenvalue of the keys' second moment is below baselines.alphaedit.threshold={settings.threshold:g}: "
            f"the smallest is {float(values[0]):.3g}, the median {float(values.median()):.3g}; raise the threshold, or "
            "give baselines.alphaedit.free_share"
        )
    return vectors[:, :free]


def projected(keys: Tensor, residuals: Tensor, free: Tensor, damping: float, history: Tensor | None = None) -> Tensor:
    """S = Xᵀ with X = Û Y and (Ûᵀ (K Kᵀ + H) Û + λI) Y = Ûᵀ K Rᵀ in float64: the equation above, written in the free
    directions, where it is symmetric. Rows are facts: keys (facts, key), residuals (facts, value)."""
    reduced = keys.double() @ free  # (facts, free)
    gram = reduced.T @ reduced
    if history is not None:
        gram += free.T @ history @ free
    gram.diagonal().add_(damping)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed):
        raise EditError(f"AlphaEdit's equation with baselines.alphaedit.damping={damping:g} has no stable solution")
    return (free @ torch.cholesky_solve(reduced.T @ residuals.double(), factor)).T

"""Sums of u uᵀ over the keys of texts that a language model reads: parts of the texts add, wherever they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from malmen.data.tokens import TokenBatch
from malmen.layers import LayerSpec
from malmen.lm import LanguageModel
from malmen.trace import rows_at

_AT_ONCE = 4 * 2**30  # bytes of sums; what goes beyond is read again


def layers_at_once(layers: Sequence[LayerSpec], limit: int = _AT_ONCE) -> list[list[LayerSpec]]:
    """Parts of the layers whose sums fit into so many bytes; each has one at least."""
    parts: list[list[LayerSpec]] = []
    for layer in layers:
        if parts and sums_bytes([*parts[-1], layer]) <= limit:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return parts


def sums_bytes(layers: Sequence[LayerSpec]) -> int:
    """What the sums of these layers take."""
    return sum(8 * layer.key_size**2 for layer in layers)


class KeySums:
    """Σ u uᵀ of each layer (key, key) in float64, and over how many tokens."""

    def __init__(self, lm: LanguageModel, layers: Sequence[LayerSpec]) -> None:
        self.lm, self.layers = lm, list(layers)
        like: dict[str, Any] = {"dtype": torch.float64, "device": lm.device}
        self.sums = {layer.name: torch.zeros(layer.key_size, layer.key_size, **like) for layer in layers}
        self.counts = {layer.name: torch.zeros((), **like) for layer in layers}

    @torch.no_grad()
    def read(self, batch: TokenBatch) -> None:
        """Run the model and add the keys of all tokens; those of a batch that does not count are left out."""
        batch = batch.to(self.lm.device)
        handles = []
        try:
            for layer in self.layers if batch.counts else ():
                module = self.lm.model.get_submodule(layer.name)
                handles.append(module.register_forward_pre_hook(self._hook(layer.name, batch.masks[layer.stack])))
            self.lm.logits(batch)
        finally:
            for handle in handles:
                handle.remove()

    def moments(self) -> dict[str, Tensor]:
        """E[u uᵀ] by layer. They take the sums' place, for they are as large."""
        return {name: total.div_(self.counts[name].clamp(min=1)) for name, total in self.sums.items()}

    def _hook(self, name: str, mask: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = rows_at(mask, args[0]).to(self.sums[name])
            self.sums[name].addmm_(rows.T, rows)
            self.counts[name] += len(rows)

        return hook

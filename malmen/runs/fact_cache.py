"""A cache of what the frozen LM computes for a fact. It does not depend on θ, so later epochs and other runs use it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from malmen.data.tokens import EncodedFact
from malmen.runs.tensor_log import TensorLog


class FactCache:
    """Tensors by content of a fact, within a budget of bytes; in memory, or in a folder that other runs share.

    A full cache stores nothing more and evicts nothing: every epoch passes all facts in a new order, so each entry is
    used once an epoch, and exchanging entries would gain nothing.
    """

    def __init__(self, budget_bytes: int, folder: Path | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.hits = self.misses = 0
        self._tensors: TensorLog | _Memory = _Memory() if folder is None else TensorLog(folder)

    @property
    def used_bytes(self) -> int:
        """Bytes of the budget that are used."""
        return self._tensors.used_bytes

    def split(
        self, kinds: Sequence[str], facts: Iterable[EncodedFact]
    ) -> tuple[list[tuple[int, EncodedFact]], list[tuple[int, EncodedFact]]]:
        """The facts with their indices: those of which every kind of tensor is cached, and the others."""
        self._tensors.refresh()
        known: list[tuple[int, EncodedFact]] = []
        fresh: list[tuple[int, EncodedFact]] = []
        for index, fact in enumerate(facts):
            (known if self.holds(kinds, fact) else fresh).append((index, fact))
        self.hits += len(known)
        self.misses += len(fresh)
        return known, fresh

    def holds(self, kinds: Sequence[str], fact: EncodedFact) -> bool:
        """Whether every kind of tensor is cached."""
        digest = _digest(fact)
        return bool(kinds) and all(f"{kind}/{digest}" in self._tensors for kind in kinds)

    def get(self, kind: str, fact: EncodedFact) -> Tensor:
        """A tensor that the cache holds."""
        return self._tensors.get(f"{kind}/{_digest(fact)}")

    def put(self, fact: EncodedFact, tensors: dict[str, Tensor]) -> None:
        """Store these tensors by kind, if there is room for all of them."""
        digest = _digest(fact)
        named = {f"{kind}/{digest}": tensor for kind, tensor in tensors.items()}
        new = {name: tensor for name, tensor in named.items() if name not in self._tensors}
        size = sum(tensor.numel() * tensor.element_size() for tensor in new.values())
        if self.used_bytes + size <= self.budget_bytes:
            self._tensors.put(new)


class _Memory:
    """Tensors by name in this process, with the interface of TensorLog."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._tensors: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def refresh(self) -> None:
        """No other process writes here."""

    def put(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name] = tensor.detach().clone()  # a view would keep its batch alive
            self.used_bytes += tensor.numel() * tensor.element_size()

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def _digest(fact: EncodedFact) -> str:
    content = repr((fact.input_ids, fact.first, fact.targets, fact.encoder_ids)).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()

"""What a frozen language model gives for a fact does not depend on θ: kept, it serves later epochs and other runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from malmen.data.tokens import EncodedFact
from malmen.runs.tensor_log import TensorLog


class FactCache:
    """Tensors by content of a fact, within a budget of bytes; in memory, or in a folder that other runs share.

    When the budget is used up nothing more is taken in, and nothing is thrown out: every epoch goes
    through all facts in a new order, so whatever stays is used once an epoch, and exchange would gain nothing.
    """

    def __init__(self, budget_bytes: int, folder: Path | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.hits = self.misses = 0
        self._tensors: TensorLog | _Memory = _Memory() if folder is None else TensorLog(folder)

    @property
    def used_bytes(self) -> int:
        """Of the budget."""
        return self._tensors.used_bytes

    def split(
        self, kinds: Sequence[str], facts: Iterable[EncodedFact]
    ) -> tuple[list[tuple[int, EncodedFact]], list[tuple[int, EncodedFact]]]:
        """The facts with their places: those of which every kind is here, and the others."""
        self._tensors.refresh()
        known: list[tuple[int, EncodedFact]] = []
        fresh: list[tuple[int, EncodedFact]] = []
        for place, fact in enumerate(facts):
            (known if self.holds(kinds, fact) else fresh).append((place, fact))
        self.hits += len(known)
        self.misses += len(fresh)
        return known, fresh

    def holds(self, kinds: Sequence[str], fact: EncodedFact) -> bool:
        """Whether all of it is here."""
        digest = _digest(fact)
        return bool(kinds) and all(f"{kind}/{digest}" in self._tensors for kind in kinds)

    def get(self, kind: str, fact: EncodedFact) -> Tensor:
        """What was put; it must be here."""
        return self._tensors.get(f"{kind}/{_digest(fact)}")

    def put(self, fact: EncodedFact, tensors: dict[str, Tensor]) -> None:
        """Take all of this in by kind, if there is room for all."""
        digest = _digest(fact)
        named = {f"{kind}/{digest}": tensor for kind, tensor in tensors.items()}
        new = {name: tensor for name, tensor in named.items() if name not in self._tensors}
        size = sum(tensor.numel() * tensor.element_size() for tensor in new.values())
        if self.used_bytes + size <= self.budget_bytes:
            self._tensors.put(new)


class _Memory:
    """Tensors by name in this process."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._tensors: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def refresh(self) -> None:
        """Nobody else writes here."""

    def put(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name] = tensor.detach().clone()  # a view would keep the whole batch
            self.used_bytes += tensor.numel() * tensor.element_size()

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def _digest(fact: EncodedFact) -> str:
    content = repr((fact.input_ids, fact.first, fact.targets, fact.encoder_ids)).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()

"""What a frozen language model gives for a fact does not depend on θ: kept, it serves later epochs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor

from malmen.data.tokens import EncodedFact


class FactCache:
    """Tensors by content of a fact, within a budget of bytes.

    When the budget is used up nothing more is taken in, and nothing is thrown out: every epoch goes
    through all facts in a new order, so whatever stays is used once an epoch, and exchange would gain nothing.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.used_bytes = budget_bytes, 0
        self.hits = self.misses = 0
        self._tensors: dict[tuple[str, bytes], Tensor] = {}

    def split(
        self, kinds: Sequence[str], facts: Iterable[EncodedFact]
    ) -> tuple[list[tuple[int, EncodedFact]], list[tuple[int, EncodedFact]]]:
        """The facts with their places: those of which every kind is here, and the others."""
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
        return bool(kinds) and all((kind, digest) in self._tensors for kind in kinds)

    def get(self, kind: str, fact: EncodedFact) -> Tensor:
        """What was put; it must be here."""
        return self._tensors[kind, _digest(fact)]

    def put(self, fact: EncodedFact, tensors: dict[str, Tensor]) -> None:
        """Take all of this in by kind, if there is room for all."""
        digest = _digest(fact)
        new = {kind: tensor for kind, tensor in tensors.items() if (kind, digest) not in self._tensors}
        size = sum(tensor.numel() * tensor.element_size() for tensor in new.values())
        if self.used_bytes + size > self.budget_bytes:
            return
        self.used_bytes += size
        for kind, tensor in new.items():
            self._tensors[kind, digest] = tensor.detach().clone()  # a view would keep the whole batch


def _digest(fact: EncodedFact) -> bytes:
    content = repr((fact.input_ids, fact.first, fact.targets, fact.encoder_ids)).encode()
    return hashlib.blake2b(content, digest_size=16).digest()

"""Edits as a set: facts are added to and taken from a model exactly, in any order, at the cost of those facts alone.

The normal equation is a sum over tokens, so the equations of a set are its facts' equations added up. What a fact
contributes (its rows: keys and value changes of its tokens, in every edited layer) depends on that fact, the frozen LM
and the editor only; it is computed once and kept, and taking the fact back subtracts the very same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import add, sub

import torch
from torch import Tensor

from malmen.data.tokens import EncodedFact, make_batches
from malmen.editor import Editor, LayerTargets
from malmen.errors import EditError
from malmen.least_squares import NormalEquation
from malmen.lm.model import LanguageModel
from malmen.lm.trace import trace


@dataclass(frozen=True)
class FactRows:
    """The rows of a list of facts: by layer, the targets of all their tokens and how many rows each fact has."""

    targets: dict[str, LayerTargets]
    counts: dict[str, list[int]]

    def __len__(self) -> int:
        return len(next(iter(self.counts.values())))

    def select(self, facts: Sequence[int]) -> FactRows:
        """The rows of these facts alone."""
        targets = {}
        for name, counts in self.counts.items():
            spans = [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
            rows = torch.tensor([row for fact in facts for row in spans[fact]], dtype=torch.long)
            targets[name] = LayerTargets(*(part[rows.to(part.device)] for part in self.targets[name]))
        return FactRows(targets, {name: [counts[fact] for fact in facts] for name, counts in self.counts.items()})

    @classmethod
    def joined(cls, parts: Sequence[FactRows]) -> FactRows:
        """The rows of several lists of facts, one list after the other."""
        return cls(
            {
                name: LayerTargets(*map(torch.cat, zip(*(part.targets[name] for part in parts), strict=True)))
                for name in parts[0].targets
            },
            {name: [count for part in parts for count in part.counts[name]] for name in parts[0].counts},
        )

    def to(self, device: torch.device) -> FactRows:
        """The rows on another device."""
        moved = {name: LayerTargets(*(part.to(device) for part in targets)) for name, targets in self.targets.items()}
        return FactRows(moved, self.counts)

    def tensors(self) -> dict[str, Tensor]:
        """Plain tensors by name, for a file: the fields of LayerTargets, and where each fact's rows begin and end."""
        named: dict[str, Tensor] = {}
        for name, targets in self.targets.items():
            offsets = torch.tensor([0, *accumulate(self.counts[name])])
            named |= {f"{name}/{part}": rows for part, rows in {**targets._asdict(), "offsets": offsets}.items()}
        return named

    @classmethod
    def of_tensors(cls, named: Mapping[str, Tensor]) -> FactRows:
        """The rows from the tensors that `tensors` gave."""
        layers = [name.removesuffix("/offsets") for name in named if name.endswith("/offsets")]
        return cls(
            {layer: LayerTargets(*(named[f"{layer}/{part}"] for part in LayerTargets._fields)) for layer in layers},
            {layer: named[f"{layer}/offsets"].diff().tolist() for layer in layers},
        )


def fact_rows(lm: LanguageModel, editor: Editor, facts: Sequence[EncodedFact]) -> FactRows:
    """Trace these facts on the unedited LM and compute their targets with the hyper-network."""
    tokens = editor.config.editor.tokens
    batches = make_batches(facts, editor.config.batch.token_budget, lm.pad_id)
    targets = editor.layer_targets(trace(lm, editor.layers, batches, tokens))
    return FactRows(
        targets, {layer.name: [fact.num_traced(layer.stack, tokens) for fact in facts] for layer in editor.layers}
    )


class EditSet:
    """The sums over the facts that hold. A change gives a new set and leaves this one as it is."""

    def __init__(self, editor: Editor, equations: dict[str, NormalEquation] | None = None, num_facts: int = 0) -> None:
        self.editor, self.equations, self.num_facts = editor, equations, num_facts

    def changed(self, added: Iterable[FactRows] = (), removed: Iterable[FactRows] = ()) -> EditSet:
        """A new set: this one with these facts added and removed."""
        sums, count = self.equations, self.num_facts
        for rows, join in chain(((rows, add) for rows in added), ((rows, sub) for rows in removed)):
            if len(rows) == 0:
                continue
            if sums is None and join is sub:
                raise EditError(f"cannot remove {len(rows)} facts from a set that holds none")
            change = {name: NormalEquation.of(*targets) for name, targets in rows.targets.items()}
            sums = change if sums is None else {name: join(sums[name], change[name]) for name in sums}
            count = join(count, len(rows))
        if count < 0:
            raise EditError(f"cannot remove {self.num_facts - count} facts from a set of {self.num_facts}")
        return EditSet(self.editor, sums if count else None, count)  # an empty set keeps no rounding errors

    def shifts(self) -> dict[str, Tensor]:
        """One shift per layer in float64, by a solve whose size does not depend on the number of facts."""
        return {} if self.equations is None else self.editor.solve_equations(self.equations)

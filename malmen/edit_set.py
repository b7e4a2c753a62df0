"""Edits as a set: facts are added to and taken from a model exactly, in any order, at the cost of those facts alone.

The normal equation is a sum over tokens, so the equations of a set are its facts' equations added up. What a fact
contributes (its rows: keys and value changes of its tokens, in every edited layer) depends on that fact, the frozen LM
and the editor only; it is computed once and kept, and taking the fact back subtracts the very same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from malmen.data.tokens import EncodedFact, make_batches
from malmen.editor import Editor, LayerTargets
from malmen.errors import EditError
from malmen.least_squares import NormalEquation
from malmen.lm.model import LanguageModel
from malmen.lm.trace import trace

_OFFSETS, _KEYS, _DIFFS = "offsets", "keys", "value_diffs"


@dataclass(frozen=True)
class FactRows:
    """The rows of a list of facts: by layer, the targets of all their tokens and where each fact's begin and end."""

    targets: dict[str, LayerTargets]
    offsets: dict[str, list[int]]  # by layer, one more than there are facts

    def __len__(self) -> int:
        return len(next(iter(self.offsets.values()))) - 1

    def select(self, facts: Sequence[int]) -> FactRows:
        """The rows of these facts alone."""
        targets, offsets = {}, {}
        for name, bounds in self.offsets.items():
            rows = torch.tensor(
                [row for fact in facts for row in range(bounds[fact], bounds[fact + 1])], dtype=torch.long
            )
            targets[name] = LayerTargets(*(part[rows.to(part.device)] for part in self.targets[name]))
            offsets[name] = _running_sum(bounds[fact + 1] - bounds[fact] for fact in facts)
        return FactRows(targets, offsets)

    @classmethod
    def joined(cls, parts: Sequence[FactRows]) -> FactRows:
        """The rows of several lists of facts, one list after the other."""
        names = list(parts[0].offsets)
        targets = {
            name: LayerTargets(*map(torch.cat, zip(*(part.targets[name] for part in parts), strict=True)))
            for name in names
        }
        counts = {name: [pair for part in parts for pair in pairwise(part.offsets[name])] for name in names}
        return cls(targets, {name: _running_sum(stop - start for start, stop in counts[name]) for name in names})

    def equations(self) -> dict[str, NormalEquation]:
        """The normal equation of these facts, by layer."""
        return {name: NormalEquation.of(*targets) for name, targets in self.targets.items()}

    def to(self, device: torch.device) -> FactRows:
        """The rows on another device."""
        moved = {name: LayerTargets(*(part.to(device) for part in targets)) for name, targets in self.targets.items()}
        return FactRows(moved, self.offsets)

    def tensors(self) -> dict[str, Tensor]:
        """Plain tensors by name, for a file."""
        named = {}
        for name, targets in self.targets.items():
            named[f"{name}/{_KEYS}"] = targets.keys
            named[f"{name}/{_DIFFS}"] = targets.value_diffs
            named[f"{name}/{_OFFSETS}"] = torch.tensor(self.offsets[name])
        return named

    @classmethod
    def of_tensors(cls, named: Mapping[str, Tensor]) -> FactRows:
        """The rows from the tensors that `tensors` gave."""
        layers = [name.removesuffix(f"/{_OFFSETS}") for name in named if name.endswith(f"/{_OFFSETS}")]
        return cls(
            {name: LayerTargets(named[f"{name}/{_KEYS}"], named[f"{name}/{_DIFFS}"]) for name in layers},
            {name: named[f"{name}/{_OFFSETS}"].tolist() for name in layers},
        )


def fact_rows(lm: LanguageModel, editor: Editor, facts: Sequence[EncodedFact]) -> FactRows:
    """Trace these facts on the unedited LM and compute their targets with the hyper-network."""
    config = editor.config
    batches = make_batches(facts, config.batch.token_budget, lm.pad_id)
    traces = trace(lm, editor.layers, batches, config.editor.tokens)
    offsets = {
        layer.name: _running_sum(fact.num_traced(layer.stack, config.editor.tokens) for fact in facts)
        for layer in editor.layers
    }
    return FactRows(editor.layer_targets(traces), offsets)


class EditSet:
    """The sums over the facts that hold. A change gives a new set and leaves this one as it is."""

    def __init__(self, editor: Editor, equations: dict[str, NormalEquation] | None = None, num_facts: int = 0) -> None:
        self.editor, self.num_facts = editor, num_facts
        self.equations = equations

    def changed(self, added: Iterable[FactRows] = (), removed: Iterable[FactRows] = ()) -> EditSet:
        """A new set: this one with these facts added and removed."""
        sums, count = self.equations, self.num_facts
        for rows, sign in chain(((rows, 1) for rows in added), ((rows, -1) for rows in removed)):
            if len(rows) == 0:
                continue
            if sign < 0 and sums is None:
                raise EditError(f"cannot remove {len(rows)} facts from a set that holds none")
            sums = rows.equations() if sums is None else _combine(sums, rows.equations(), sign)
            count += sign * len(rows)
        if count < 0:
            raise EditError(f"cannot remove {self.num_facts - count} facts from a set of {self.num_facts}")
        return EditSet(self.editor, sums if count else None, count)  # an empty set keeps no rounding errors

    def shifts(self) -> dict[str, Tensor]:
        """One shift per layer in float64, by a solve whose size does not depend on the number of facts."""
        if self.equations is None:
            return {}
        return self.editor.solve_equations(self.equations)


def _combine(
    sums: Mapping[str, NormalEquation], change: Mapping[str, NormalEquation], sign: int
) -> dict[str, NormalEquation]:
    return {name: sums[name] + change[name] if sign > 0 else sums[name] - change[name] for name in sums}


def _running_sum(counts: Iterable[int]) -> list[int]:
    total = [0]
    for count in counts:
        total.append(total[-1] + count)
    return total

"""Edits as a set: facts are added to and taken from a model exactly, in any order, at the cost of those facts alone.

The normal equation is a sum over tokens, so the equations of a set are its facts' equations added up; a small set keeps
the facts' rows instead, and is solved in the (token, token) form. What a fact contributes (its rows: keys and value
changes of its tokens, in every edited layer) depends on that fact, the frozen LM and the editor only; it is computed
once and kept, and taking the fact back takes the very same rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, chain
from operator import add, sub

import torch
from torch import Tensor

from malmen.data.tokens import EncodedFact, make_batches
from malmen.editor import Editor, LayerTargets
from malmen.errors import EditError
from malmen.least_squares import NormalEquation, is_dual
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

    def weighed(self, weights: Sequence[float]) -> FactRows:
        """The same facts, each counting so often: Σ w‖Su − d‖² is the plain sum over √w u and √w d. Facts leave a set
        with the weights that they joined it with."""
        if len(weights) != len(self) or not all(0 < weight < math.inf for weight in weights):
            raise EditError(f"{len(self)} facts need as many positive weights, not {list(weights)[:8]}")
        targets = {}
        for name, counts in self.counts.items():
            keys, diffs = self.targets[name]
            roots = torch.tensor(weights, dtype=torch.float64).sqrt().repeat_interleave(torch.tensor(counts))[:, None]
            targets[name] = LayerTargets(keys * roots.to(keys), diffs * roots.to(diffs))
        return FactRows(targets, self.counts)

    @cached_property
    def digests(self) -> list[bytes]:
        """A name for the rows of each fact: equal for equal rows."""
        names = [blake2b(digest_size=16) for _ in range(len(self))]
        for layer, counts in self.counts.items():
            for part in self.targets[layer]:
                for name, rows in zip(names, part.detach().cpu().split(counts), strict=True):
                    name.update(rows.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return [name.digest() for name in names]

    def without(self, leaving: Counter[bytes]) -> FactRows:
        """The rows but those of facts that are leaving, which are struck off."""
        stay = []
        for fact, name in enumerate(self.digests):
            if leaving[name]:
                leaving[name] -= 1
            else:
                stay.append(fact)
        return self if len(stay) == len(self) else self.select(stay)

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
    """The facts that hold: their rows while those are few, then their sums. A change gives a new set and leaves this
    one as it is."""

    def __init__(
        self,
        editor: Editor,
        equations: dict[str, NormalEquation] | None = None,
        num_facts: int = 0,
        held: tuple[FactRows, ...] = (),
    ) -> None:
        self.editor, self.equations, self.num_facts, self.held = editor, equations, num_facts, held

    def changed(self, added: Iterable[FactRows] = (), removed: Iterable[FactRows] = ()) -> EditSet:
        """A new set: this one with these facts added and removed."""
        held, sums, count = self.held, self.equations, self.num_facts
        for rows, join in chain(((rows, add) for rows in added), ((rows, sub) for rows in removed)):
            if len(rows) == 0:
                continue
            if not held and sums is None and join is sub:
                raise EditError(f"cannot remove {len(rows)} facts from a set that holds none")
            count = join(count, len(rows))
            if sums is None:
                parts = (*held, rows) if join is add else _without(held, rows)
                if parts is not None and self._are_few(parts):
                    held = parts
                    continue
                sums, held = _equations(held), ()
            change = _equations([rows])
            assert change is not None
            sums = change if sums is None else {name: join(sums[name], change[name]) for name in sums}
        if count < 0:
            raise EditError(f"cannot remove {self.num_facts - count} facts from a set of {self.num_facts}")
        return EditSet(self.editor, sums, count, held) if count else EditSet(self.editor)  # which keeps no rounding

    def shifts(self) -> dict[str, Tensor]:
        """One shift per layer in float64, by a solve whose size is bounded whatever the number of facts."""
        if self.held:
            return self.editor.solve_targets(FactRows.joined(self.held).targets)
        return {} if self.equations is None else self.editor.solve_equations(self.equations)

    def _are_few(self, parts: Sequence[FactRows]) -> bool:
        """Whether every layer is solved by its tokens; a sum of shifts is not solved at all."""
        settings = self.editor.config.editor
        return settings.aggregation == "least_squares" and all(
            is_dual(
                sum(len(part.targets[layer.name].keys) for part in parts),
                layer.key_size,
                layer.value_size,
                preserving=settings.preserving,
                damped=settings.regularisation,
            )
            for layer in self.editor.layers
        )


def _without(held: Sequence[FactRows], rows: FactRows) -> tuple[FactRows, ...] | None:
    """The held rows but these; None if some of these are not among them, for sums to tell."""
    leaving = Counter(rows.digests)
    parts = tuple(part for part in (part.without(leaving) for part in held) if len(part))
    return None if leaving.total() else parts


def _equations(parts: Sequence[FactRows]) -> dict[str, NormalEquation] | None:
    """The equations of these rows; None for no rows."""
    if not parts:
        return None
    return {name: NormalEquation.of(*targets) for name, targets in FactRows.joined(parts).targets.items()}

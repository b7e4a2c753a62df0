"""Several editors that share the work of one: how the tokens are divided, and what the editors exchange.

The work is divided by layer first, by tokens second. Every result of a layer is a sum over its tokens, so
the editors exchange sums only: the normaliser's statistics, the normal equation, and the gradient of θ. After
every step all editors hold the same θ, and θ itself never travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from itertools import pairwise
from math import floor

import torch
import torch.distributed as dist
from torch import Tensor, nn

from malmen.hypernet import Statistics
from malmen.least_squares import (
    NormalEquation,
    Pullback,
    SmallSolution,
    Solution,
    is_dual,
    solve_dual,
    solve_least_squares,
)
from malmen.preserved import Preserved


@dataclass(frozen=True)
class Share:
    """A part of one layer's tokens: those between two fractions of the length of their list."""

    layer: str
    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(1)

    def rows(self, count: int) -> slice:
        """Its rows of a list of `count`; the shares of a layer cover the list without overlap."""
        return slice(floor(self.start * count), floor(self.stop * count))


def divide(layers: Sequence[str], editors: int) -> list[list[Share]]:
    """The layers laid end to end and cut into equal parts, one for each editor."""
    cuts = [Fraction(editor * len(layers), editors) for editor in range(editors + 1)]
    return [
        [
            Share(layer, max(begin - place, Fraction(0)), min(end - place, Fraction(1)))
            for place, layer in enumerate(layers)
            if begin < place + 1 and end > place
        ]
        for begin, end in pairwise(cuts)
    ]


def find_members(plan: Sequence[Sequence[Share]]) -> dict[str, list[int]]:
    """By layer, the ranks of the editors that have tokens of it."""
    members: dict[str, list[int]] = {}
    for world_rank, shares in enumerate(plan):
        for share in shares:
            members.setdefault(share.layer, []).append(world_rank)
    return members


class Shards:
    """What an editor asks of the editors that it shares the work with; as it is, there are none."""

    def gather_statistics(self, mine: Mapping[str, Statistics]) -> Iterable[tuple[str, Statistics]]:
        """The statistics of all editors, by layer, in the same order everywhere."""
        return mine.items()

    def solve(
        self,
        layer: str,
        keys: Tensor,
        value_diffs: Tensor,
        damping: float,
        preserved: Preserved | None,
        *,
        sliced: bool,
    ) -> SolvedShard:
        """S* for all tokens of the layer, given this editor's; all editors know the keys to preserve."""
        return solve_least_squares(keys, value_diffs, damping, preserved, sliced=sliced)

    def sum_shift(self, layer: str, shift: Tensor) -> Tensor:
        """The sum of all editors' shifts of the layer (MEND's way of merging)."""
        return shift

    def leads(self, layer: str) -> bool:
        """Whether what must be added once for the layer is this editor's to add."""
        return True

    def sum_grads(self, parameters: Iterable[nn.Parameter]) -> None:
        """The sum of all editors' gradients, in place."""


@dataclass(frozen=True)
class PartOfDual:
    """The dual solution of a layer whose tokens are on several editors, seen from one of them."""

    solution: SmallSolution
    all_keys: Tensor  # (all tokens, key)
    rows: slice  # this editor's

    @property
    def shift(self) -> Tensor:
        """S* (value, key)."""
        return self.solution.shift

    def pull_back(self, shift_grad: Tensor, _keys: Tensor) -> Pullback:
        """∇_D L of this editor's tokens; dL/dλ of all."""
        pullback = self.solution.pull_back(shift_grad, self.all_keys)
        assert pullback.diffs_grad is not None
        return replace(pullback, diffs_grad=pullback.diffs_grad[self.rows])


SolvedShard = Solution | PartOfDual  # a solution, seen from the tokens of one editor


class ProcessGroupShards(Shards):
    """Editors in processes of their own, one for each rank of torch's default process group."""

    def __init__(self, layer_features: Mapping[str, int], seconds: float) -> None:
        """`seconds`: how long an editor waits for the others in a layer's sum; torch's own bound is half an hour."""
        self.features = dict(layer_features)  # key + value size by layer
        self.world_rank = dist.get_rank()
        self.members = find_members(divide(list(self.features), dist.get_world_size()))
        shared = {layer: ranks for layer, ranks in self.members.items() if len(ranks) > 1}
        bound = timedelta(seconds=seconds)
        self.groups = {layer: dist.new_group(ranks, timeout=bound) for layer, ranks in shared.items()}

    def gather_statistics(self, mine: Mapping[str, Statistics]) -> Iterable[tuple[str, Statistics]]:
        """By layer, then by rank."""
        like = next(iter(mine.values())).mean
        held = [mine.get(layer) or Statistics.of(like.new_empty(0, size)) for layer, size in self.features.items()]
        flat = torch.cat([torch.cat((of.count[None], of.mean, of.squares)) for of in held])
        received = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(received, flat)
        sizes = [1 + 2 * size for size in self.features.values()]
        for layer, *vectors in zip(self.features, *(vector.split(sizes) for vector in received), strict=True):
            for vector in vectors:
                count, mean, squares = vector.split((1, self.features[layer], self.features[layer]))
                yield layer, Statistics(count[0], mean, squares)

    def solve(
        self,
        layer: str,
        keys: Tensor,
        value_diffs: Tensor,
        damping: float,
        preserved: Preserved | None,
        *,
        sliced: bool,
    ) -> SolvedShard:
        """By rows where there are few, else by the sums of the normal equation."""
        if len(self.members[layer]) == 1:
            return solve_least_squares(keys, value_diffs, damping, preserved, sliced=sliced)
        counts = self.count_tokens(layer, len(keys))
        sizes = keys.shape[1], value_diffs.shape[1]
        if is_dual(
            sum(counts), *sizes, preserving=preserved is not None, damped=damping > 0
        ):  # then (tokens, key) is less to send
            all_keys, all_diffs = (self.gather_rows(layer, rows, counts) for rows in (keys, value_diffs))
            first = sum(counts[: self.members[layer].index(self.world_rank)])
            solution = solve_dual(all_keys, all_diffs, damping, preserved, sliced=sliced)
            return PartOfDual(solution, all_keys, slice(first, first + len(keys)))
        equation = NormalEquation.of(keys, value_diffs, sliced=sliced)
        self.sum_tensor(layer, equation.gram)
        self.sum_tensor(layer, equation.cross)
        return equation.solve(damping, preserved)

    def sum_shift(self, layer: str, shift: Tensor) -> Tensor:
        """Over the members of the layer."""
        if len(self.members[layer]) > 1:
            self.sum_tensor(layer, shift)
        return shift

    def leads(self, layer: str) -> bool:
        """True for the first member of the layer."""
        return self.members[layer][0] == self.world_rank

    def sum_grads(self, parameters: Iterable[nn.Parameter]) -> None:
        """One sum for each parameter; an editor without a gradient adds zero."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    # --- the transport among the members of a layer; `malmen plan` overrides it -----------------------------

    def count_tokens(self, layer: str, mine: int) -> list[int]:
        """How many tokens of the layer each member has."""
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        count = torch.tensor([mine], device=device)
        counts = [torch.empty_like(count) for _ in self.members[layer]]
        dist.all_gather(counts, count, group=self.groups[layer])
        return [int(member_count) for member_count in counts]

    def gather_rows(self, layer: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all members (all tokens, size), in their order; padded on the way, because collectives want equal
        shapes."""
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, group=self.groups[layer])
        return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])

    def sum_tensor(self, layer: str, tensor: Tensor) -> None:
        """The sum over all members, in place."""
        dist.all_reduce(tensor, group=self.groups[layer])

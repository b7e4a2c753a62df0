"""What an editor makes of traces: the wishes of tokens, and the shifts that they are merged into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from malmen.hypernet_rows import HypernetRows
from malmen.shards import SolvedShard
from malmen.trace import Traces


class LayerWishes(NamedTuple):
    """Rows are tokens. Under `aggregation: sum` they are pseudo keys and scaled gradients: S = Σ diffᵀ key."""

    keys: Tensor  # u (tokens, key)
    value_diffs: Tensor  # d (tokens, value)


@dataclass
class Solved:
    """The shifts of one set of edits, and what `backward` needs of how they came about."""

    traces: Traces
    shifts: dict[str, Tensor]  # S* in float64
    solutions: dict[str, SolvedShard] = field(default_factory=dict)
    value_diffs: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, list[HypernetRows]] = field(default_factory=dict)  # by network, with the graph

    def mean_residual(self) -> float | None:
        """MR: the mean of the residuals over layers and tokens (§5.2); None for a sum, which solves nothing."""
        return float(self.residuals().mean()) if self.value_diffs else None

    def residuals(self) -> Tensor:
        """r_j = ‖S*u_j − d_j‖ / ‖d_j‖ of each layer and token."""
        residuals = [torch.zeros(0, dtype=torch.float64)]
        for name, diffs in self.value_diffs.items():
            wanted = diffs.double()
            error = self.traces[name].keys.double() @ self.shifts[name].T - wanted
            residuals.append(error.norm(dim=-1) / wanted.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny))
        return torch.cat([part.cpu() for part in residuals])

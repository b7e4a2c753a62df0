"""UltraEdit: no training; normalised keys and gradients, and the same least squares (Gu et al., 2025).

Keys and value gradients are normalised feature by feature over all tokens seen so far. The value difference is
d = −η ‖û‖² ĝ, with û and ĝ normalised, and the shift solves the damped normal equation of the keys u themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from malmen.config import Config
from malmen.data.records import Fact
from malmen.edit_method import PlainEdit, finite, require_facts
from malmen.errors import EditError
from malmen.hypernet import RunningNorm, Statistics
from malmen.least_squares import NormalEquation
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, encode_batches
from malmen.lm.trace import LayerTrace, trace


@dataclass
class SeenTokens:
    """The statistics that go on from edit to edit, by layer."""

    norms: dict[str, RunningNorm] = field(default_factory=dict)

    def normalise(self, layer: str, found: LayerTrace) -> tuple[Tensor, Tensor]:
        """Take these tokens in, and give them normalised: û (tokens, key), ĝ (tokens, value); float64."""
        rows = torch.cat(found, dim=-1).double()
        norm = self.norms.setdefault(layer, RunningNorm(1, rows.shape[1]).to(rows.device))
        norm.merge(0, Statistics.of(rows))
        if float(norm.count[0]) < 2:
            raise EditError(
                "UltraEdit normalises over the tokens it has seen, and one alone becomes zero: give more facts, or "
                "baselines.ultraedit.tokens=all"
            )
        members = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
        keys, grads = norm(members, rows).split((found.keys.shape[1], found.value_grads.shape[1]), dim=-1)
        return keys, grads


class UltraEdit:
    """Needs the model alone."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        self.config, self.settings = config, config.baselines.ultraedit
        self.layers = find_layers(lm.model, self.settings.layers, self.settings.ffn)

    @torch.no_grad()
    def edit(self, lm: LanguageModel, facts: Sequence[Fact], seen: SeenTokens | None = None) -> PlainEdit:
        """One round; with `seen` the statistics of earlier rounds go on, without they are of these facts alone."""
        require_facts(facts)
        seen = seen or SeenTokens()
        traces = trace(lm, self.layers, encode_batches(lm, facts, self.config), self.settings.tokens)
        shifts, residuals = {}, []
        for name, found in traces.items():
            keys, grads = seen.normalise(name, found)
            diffs = -self.settings.edit_lr * keys.square().sum(-1, keepdim=True) * grads
            shifts[name] = NormalEquation.of(found.keys, diffs).solve(self.settings.damping).shift
            missed = found.keys.double() @ shifts[name].T - diffs
            residuals.append(missed.norm(dim=-1) / diffs.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny))
        return PlainEdit(finite(shifts), float(torch.cat(residuals).mean()))

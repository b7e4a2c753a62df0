"""UltraEdit: no training; normalised keys and gradients, and the same least squares (Gu et al., 2025).

Keys and value gradients are normalised feature by feature over all tokens seen so far. The value difference is
d = −η ‖û‖² ĝ, with û and ĝ normalised, and the shift solves the damped normal equation of the keys u themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from malmen.config import Config
from malmen.data.records import Fact
from malmen.edit_method import PlainEdit, UntrainedMethod
from malmen.editor import finite, require_facts
from malmen.errors import EditError
from malmen.hypernet import RunningNorm, Statistics
from malmen.least_squares import NormalEquation, token_residuals
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, encode_batches
from malmen.lm.trace import LayerTrace, trace

Norms = dict[str, RunningNorm]  # of the keys and value gradients of each layer; a series of edits shares them


class UltraEdit(UntrainedMethod):
    """Needs nothing but the model."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        self.config, self.settings = config, config.baselines.ultraedit
        self.layers = find_layers(lm.model, self.settings.layers, self.settings.ffn)
        self.seen: Norms | None = None  # None: every edit begins with fresh statistics

    def for_rounds(self) -> UltraEdit:
        """A copy whose statistics continue from edit to edit."""
        series = copy.copy(self)
        series.seen = {}
        return series

    @torch.no_grad()
    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> PlainEdit:
        """One solve, with statistics of these facts alone or, in rounds, of all facts so far."""
        require_facts(facts)
        seen: Norms = {} if self.seen is None else self.seen
        traces = trace(lm, self.layers, encode_batches(lm, facts, self.config), self.settings.tokens)
        shifts, residuals = {}, []
        for name, traced in traces.items():
            keys, grads = _normalise(seen, name, traced)
            diffs = -self.settings.edit_lr * keys.square().sum(-1, keepdim=True) * grads
            shifts[name] = NormalEquation.of(traced.keys, diffs).solve(self.settings.damping).shift
            residuals.append(token_residuals(traced.keys.double(), shifts[name], diffs))
        return PlainEdit(finite(shifts), float(torch.cat(residuals).mean()))


def _normalise(seen: Norms, layer: str, traced: LayerTrace) -> tuple[Tensor, Tensor]:
    """Merge these tokens into the statistics and normalise them: û (tokens, key), ĝ (tokens, value); float64."""
    rows = torch.cat(traced, dim=-1).double()
    norm = seen.setdefault(layer, RunningNorm(1, rows.shape[1]).to(rows.device))
    norm.merge(0, Statistics.of(rows))
    if float(norm.count[0]) < 2:
        raise EditError(
            "UltraEdit normalises over the tokens it has seen, and one alone becomes zero: give more facts, or "
            "baselines.ultraedit.tokens=all"
        )
    members = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    keys, grads = norm(members, rows).split((traced.keys.shape[1], traced.value_grads.shape[1]), dim=-1)
    return keys, grads

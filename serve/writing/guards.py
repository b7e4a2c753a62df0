"""What is measured of a new version before it is served."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact, make_batches
from malmen.evaluate import predict_tokens, shift_ratio
from malmen.lm.losses import nll
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import edited
from malmen.serve.settings import GuardConfig


@dataclass(frozen=True)
class Measured:
    """A version, compared with the unedited model."""

    finite: bool
    max_shift_ratio: float
    perplexity_ratio: float | None  # on the probes, edited : unedited; None without probes
    predicted: list[list[int]]  # the most probable answer tokens of each new fact, teacher-forced

    def report(self) -> dict[str, Any]:
        """As JSON: numbers that are not finite are null."""
        numbers = {"max_shift_ratio": self.max_shift_ratio, "perplexity_ratio": self.perplexity_ratio}
        return {name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()}


class Guards:
    """The limits, and the probes to measure a version with."""

    def __init__(self, lm: LanguageModel, config: GuardConfig, probes: Sequence[Fact], token_budget: int, data: Any):
        self.lm, self.config, self.token_budget = lm, config, token_budget
        encoder = fact_encoder(lm, data)
        self.probes = [encoder.encode(probe) for probe in probes]
        self._unedited = self._probe_loss()

    def measure(self, shifts: Mapping[str, Tensor], facts: Sequence[EncodedFact]) -> Measured:
        """Measure the model under these shifts; `facts` are the new ones."""
        if not all(bool(torch.isfinite(shift).all()) for shift in shifts.values()):
            return Measured(False, math.inf, None, [[] for _ in facts])
        with edited(self.lm, shifts):
            predicted = predict_tokens(self.lm, facts, self.token_budget) if facts else []
            loss = self._probe_loss()
        ratio = math.exp(min(loss - self._unedited, 700.0)) if self.probes else None
        return Measured(True, max(shift_ratio(self.lm, shifts).values(), default=0.0), ratio, predicted)

    def reasons(self, measured: Measured) -> list[str]:
        """Why the version may not be published; empty if it may."""
        reasons = []
        if not measured.finite:
            reasons.append("the shift holds values that are not finite")
        elif measured.max_shift_ratio > self.config.max_shift_ratio:
            reasons.append(
                f"‖S‖/‖W‖ would be {measured.max_shift_ratio:.3g}, above guard.max_shift_ratio "
                f"{self.config.max_shift_ratio:.3g}: the edits would change the weights more than is safe"
            )
        ratio = measured.perplexity_ratio
        if ratio is not None and not ratio <= self.config.max_perplexity_ratio:
            reasons.append(
                f"perplexity on the {len(self.probes)} probes would grow {ratio:.3g}-fold, above "
                f"guard.max_perplexity_ratio {self.config.max_perplexity_ratio:.3g}: unrelated answers would suffer"
            )
        return reasons

    @torch.no_grad()
    def _probe_loss(self) -> float:
        """Mean −log p of the probes' answer tokens."""
        total, count = 0.0, 0
        for batch in make_batches(self.probes, self.token_budget, self.lm.pad_id):
            batch = batch.to(self.lm.device)
            total += float(nll(self.lm.log_probs(batch), batch.targets))
            count += len(batch.targets)
        return total / max(count, 1)

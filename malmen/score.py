"""One number for an evaluation: what checkpoints and the trials of a sweep are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import harmonic_mean
from typing import Any


def score(scores: Mapping[str, Any] | None) -> float | None:
    """The harmonic mean of ES, GS and LS, LS relative to the unedited model; what was not measured is left out."""
    if not scores:
        return None
    measured = [scores.get("edit_success"), scores.get("generalization_success"), _relative_locality(scores)]
    parts = [part for part in measured if part is not None]
    return float(harmonic_mean(parts)) if parts else None


def _relative_locality(scores: Mapping[str, Any]) -> float | None:
    """1 where the edit cost no right answer; where there was none to lose, the share of unchanged ones."""
    after, before = scores.get("locality_success"), scores.get("locality_success_before")
    if after is None:
        return None
    return min(1.0, after / before) if before else scores.get("locality_agreement")

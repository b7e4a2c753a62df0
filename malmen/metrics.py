"""One number for an evaluation: what checkpoints and the trials of a sweep are compared by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean
from typing import Any

PARTS = ("edit_success", "generalization_success", "relative_locality")


def score(scores: Mapping[str, Any] | None, parts: Sequence[str] = PARTS) -> float | None:
    """The harmonic mean of ES, GS and LS, LS relative to the unedited model; what was not measured is left out."""
    if not scores:
        return None
    measured = [relative_locality(scores) if part == "relative_locality" else scores.get(part) for part in parts]
    found = [part for part in measured if part is not None]
    return float(harmonic_mean(found)) if found else None


def relative_locality(scores: Mapping[str, Any]) -> float | None:
    """1 where the edit cost no right answer; where there was none to lose, the share of unchanged ones."""
    after, before = scores.get("locality_success"), scores.get("locality_success_before")
    if after is None:
        return None
    return min(1.0, after / before) if before else scores.get("locality_agreement")

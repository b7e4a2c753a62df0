"""The paper's three metrics by name (ES, GS, LS), and the one number that evaluations are compared by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean
from typing import Any, NamedTuple

from malmen.data.records import FactKind


class Metric(NamedTuple):
    """A share of right answers, as the paper reports it (§3)."""

    name: str  # the key in score tables, JSON and MLflow
    label: str  # the paper's abbreviation
    kind: FactKind  # of the facts whose answers are counted


METRICS = (
    Metric("edit_success", "ES", "edit"),
    Metric("generalization_success", "GS", "equivalent"),
    Metric("locality_success", "LS", "unrelated"),
)

FOLLOWING = (  # what follows from an edit: reported where the records have it
    Metric("portability_success", "portability", "portability"),
    Metric("reversal_success", "reversal", "reversal"),
)

# What may follow a metric's name: how answers are counted, then `BEFORE` where the model is the unedited one.
BY_TOKENS = ""  # answer tokens, teacher-forced: the paper's
EXACT = "_exact"  # whole answers, teacher-forced
GENERATED = "_generated"  # whole answers, generated
ENDED = "_ended"  # whole answers, generated, after which the text ends
DEPLOYED_EXACT = "_deployed_exact"  # whole answers as a user of the deployed model gets them, as texts
DEPLOYED_CONTAINED = "_deployed_contained"  # the same, where the text may say more
BEFORE = "_before"
FLOOR = "_floor"  # after a measure along its own texts: of the unedited model, rounded to bfloat16

SCORE_PARTS = ("edit_success", "generalization_success", "relative_locality")


def score(scores: Mapping[str, Any] | None, parts: Sequence[str] = SCORE_PARTS) -> float | None:
    """The harmonic mean of ES, GS and LS, LS relative to the unedited model. Parts that were not measured are left
    out; None without any."""
    if not scores:
        return None
    values = {**scores, "relative_locality": relative_locality(scores)}
    measured = [values[part] for part in parts if values.get(part) is not None]
    return float(harmonic_mean(measured)) if measured else None


def relative_locality(scores: Mapping[str, Any]) -> float | None:
    """LS after : before the edit, at most 1. Where LS was 0 before, the share of unchanged answers."""
    after, before = scores.get("locality_success"), scores.get("locality_success_before")
    if after is None:
        return None
    return min(1.0, after / before) if before else scores.get("locality_agreement")

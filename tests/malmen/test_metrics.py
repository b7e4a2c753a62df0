from __future__ import annotations

from typing import Any

import pytest

from malmen.metrics import METRICS, SCORE_PARTS, score


def _scores(**changed: Any) -> dict[str, Any]:
    measured = {
        "edit_success": 1.0,
        "generalization_success": 0.5,
        "locality_success": 0.3,
        "locality_success_before": 0.6,
        "locality_agreement": 0.9,
    }
    return {**measured, **changed}


def test_a_score_is_the_harmonic_mean_with_locality_relative_to_the_unedited_model() -> None:
    assert score(_scores()) == pytest.approx(3 / (1 / 1.0 + 1 / 0.5 + 1 / 0.5))


def test_more_right_answers_than_before_count_as_none_lost() -> None:
    assert score(_scores(locality_success=0.7)) == pytest.approx(3 / (1 + 2 + 1))


@pytest.mark.parametrize("before", [0.0, None])
def test_where_the_unedited_model_was_never_right_unchanged_answers_count(before: float | None) -> None:
    assert score(_scores(locality_success_before=before)) == pytest.approx(3 / (1 + 2 + 1 / 0.9))
    without = _scores(locality_success_before=before, locality_agreement=None)
    assert score(without) == pytest.approx(2 / (1 + 2))


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [("edit_success", 2 / (2 + 2)), ("generalization_success", 2 / (1 + 2)), ("locality_success", 2 / (1 + 2))],
)
def test_what_was_not_measured_is_left_out(left_out: str, expected: float) -> None:
    assert score(_scores(**{left_out: None})) == pytest.approx(expected)


def test_one_complete_failure_makes_the_score_nought() -> None:
    assert score(_scores(locality_success=0.0)) == 0.0
    assert score(_scores(generalization_success=0.0)) == 0.0


@pytest.mark.parametrize("nothing", [None, {}, {"edits": 8, "edit_success": None}])
def test_without_an_evaluation_there_is_no_score(nothing: dict[str, Any] | None) -> None:
    assert score(nothing) is None


def test_the_papers_metrics_have_one_name_one_label_and_one_kind_of_fact_each() -> None:
    assert [(metric.label, metric.kind) for metric in METRICS] == [
        ("ES", "edit"), ("GS", "equivalent"), ("LS", "unrelated"),
    ]  # fmt: skip
    assert SCORE_PARTS[:2] == tuple(metric.name for metric in METRICS[:2])

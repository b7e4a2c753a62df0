from __future__ import annotations

from malmen.tune.results import pareto_front, trial_row
from malmen.tune.sweep_folder import Judgement, Status, TrialRecord


def trial(number: int, gs: float | None, ls: float | None, status: Status = "finished") -> TrialRecord:
    scores = {"edit_success": 1.0, "generalization_success": gs, "locality_success": ls}
    return TrialRecord(number, {"layers": "last:1"}, status, (Judgement(3, 0.5, scores, 2.0),))


def test_the_pareto_front_holds_the_finished_trials_that_none_beats() -> None:
    trials = [
        trial(0, 0.9, 0.2),
        trial(1, 0.5, 0.5),
        trial(2, 0.5, 0.4),  # beaten by 1
        trial(3, 0.2, 0.9),
        trial(4, 0.95, 0.95, "stopped"),  # had fewer steps
        trial(5, None, 0.99),
        trial(6, 0.5, 0.5),  # equal to 1: neither beats the other
        TrialRecord(7, {}, "failed"),
    ]
    assert [found.number for found in pareto_front(trials)] == [3, 1, 6, 0]
    assert pareto_front([]) == []


def test_a_row_shows_the_last_evaluation_and_a_trial_without_one_has_none() -> None:
    row = trial_row(trial(0, 0.9, 0.2).judged(Judgement(6, 0.7, {"edit_success": 0.8}, 4.0)))
    assert (row["step"], row["score"], row["ES"], row["GS"], row["seconds"]) == (6, 0.7, 0.8, None, 4.0)
    assert row["layers"] == "last:1"
    empty = trial_row(TrialRecord(1, {}, "failed", why="it broke"))
    assert (empty["step"], empty["score"], empty["why"]) == (0, None, "it broke")

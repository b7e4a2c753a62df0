from __future__ import annotations

import pytest

from malmen.errors import EditError
from malmen.tune.champion import best_trial
from malmen.tune.record import Judgement, Status, TrialRecord


def trial(number: int, score: float, status: Status = "finished") -> TrialRecord:
    return TrialRecord(
        number, {}, status, (Judgement(3, score, {}, 1.0),), why="it broke" if status == "failed" else ""
    )


def test_the_best_trial_is_the_highest_score_after_all_steps_and_of_equals_the_first() -> None:
    trials = [trial(0, 0.5), trial(1, 0.9, "stopped"), trial(2, 0.7), trial(3, 0.7), trial(4, 0.95, "failed")]
    assert best_trial(trials).number == 2


def test_without_a_finished_trial_the_reasons_are_named() -> None:
    with pytest.raises(EditError, match=r"no trial has finished.*trial 1: it broke"):
        best_trial([trial(0, 0.5, "stopped"), trial(1, 0.5, "failed")])

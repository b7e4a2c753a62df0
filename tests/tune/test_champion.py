from __future__ import annotations

import json
from pathlib import Path

import pytest

from malmen.config import Config
from malmen.errors import EditError
from malmen.runs.run_folder import RunFolder
from malmen.tune.champion import _train_again, best_trial
from malmen.tune.follow import ProgressListener
from malmen.tune.sweep_folder import Judgement, Status, TrialRecord


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


@pytest.mark.parametrize(("saved", "finished", "goes_on"), [(None, False, True), (5, False, True), (5, True, False)])
def test_the_best_trials_second_training_goes_on_until_it_is_measured(
    saved: int | None, finished: bool, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed between its last checkpoint and that one's scores has all its steps, and no score."""
    config = Config.model_validate({"training": {"steps": 5}})
    RunFolder.open(tmp_path, config).begin({"finished": finished})
    if saved:
        (tmp_path / f"checkpoint-{saved:07d}").mkdir()
        state = {"format": 1, "step": saved, "scores": {}}
        (tmp_path / f"checkpoint-{saved:07d}" / "state.json").write_text(json.dumps(state))
    trained: list[Path] = []
    monkeypatch.setattr("malmen.tune.champion.train", lambda _config, place, **_: trained.append(place))
    _train_again(config, tmp_path, None, ProgressListener())
    assert trained == [tmp_path] * goes_on

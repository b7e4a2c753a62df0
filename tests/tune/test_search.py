from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from ray.tune.search import Searcher

from malmen.tune.settings import SweepConfig, parse_sweep
from malmen.tune.space import SweepSearch
from malmen.tune.sweep_folder import Judgement, SweepFolder

COEF = "training.locality_coef"


def space(**changes: Any) -> SweepConfig:
    raw = {
        "trials": 6,
        "layer_sets": ["last:1", "last:2"],
        "parameters": {COEF: {"low": 0.1, "high": 10.0, "log": True}, "editor.rank": {"low": 4, "high": 8}},
    }
    return parse_sweep({**raw, **changes}, "the test")


def play(folder: SweepFolder, sweep: SweepConfig, number: int) -> None:
    """A search whose trials end one after the other, with a score that the coefficient decides."""
    search = SweepSearch(folder, sweep)
    for index in range(number):
        found = search.suggest(f"id{index}")
        assert isinstance(found, dict)
        trial = folder.get(found["number"])
        assert trial is not None
        score = 1 / (1 + abs(trial.params[COEF] - 1))
        if not trial.ended:
            folder.put(replace(trial.judged(Judgement(3, score, {}, 0.0)), status="finished"))
        search.on_trial_complete(f"id{index}", {"score": score, "failed": ""})


def params(folder: SweepFolder) -> list[dict[str, Any]]:
    return [trial.params for trial in folder.trials()]


@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_a_search_that_was_killed_and_goes_on_tries_what_it_would_have_tried(tmp_path: Path, kind: str) -> None:
    sweep = space(search=kind)
    whole, cut = SweepFolder(tmp_path / "whole"), SweepFolder(tmp_path / "cut")
    play(whole, sweep, 6)
    play(cut, sweep, 3)
    before = params(cut)
    play(cut, sweep, 6)
    assert params(cut)[:3] == before
    assert params(cut) == params(whole)
    assert len({str(found) for found in params(whole)}) == 6


@pytest.mark.parametrize("kind", ["random", "grid", "optuna"])
def test_a_trial_is_on_disk_before_ray_tune_hears_of_it_and_there_are_no_more_than_asked_for(
    tmp_path: Path, kind: str
) -> None:
    folder = SweepFolder(tmp_path)
    search = SweepSearch(folder, space(search=kind, trials=3, parameters={COEF: [0.5, 1.0]}))
    for number in range(3):
        assert search.suggest(f"id{number}") == {"number": number}
        assert len(folder.trials()) == number + 1
    assert search.suggest("another") == Searcher.FINISHED
    assert len(folder.trials()) == 3


def test_optuna_learns_from_trials_that_have_ended(tmp_path: Path) -> None:
    def middle_miss(kind: str) -> float:
        folder = SweepFolder(tmp_path / kind)
        only = {"parameters": {COEF: {"low": 0.01, "high": 100.0, "log": True}}, "layer_sets": []}
        play(folder, space(search=kind, trials=40, **only), 40)
        return median(abs(math.log(found[COEF])) for found in params(folder)[20:])

    assert middle_miss("optuna") < 0.5 * middle_miss("random")


def test_a_trial_that_failed_is_told_to_optuna_as_failed(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    search = SweepSearch(folder, space(search="optuna"))
    for number, result in enumerate(({"score": 0.0, "failed": "why"}, None, {"score": 0.5, "failed": ""})):
        search.suggest(f"id{number}")
        search.on_trial_complete(f"id{number}", result, error=result is None)
    assert search._optuna is not None
    states = [trial.state.name for trial in search._optuna.study.trials]
    assert states == ["FAIL", "FAIL", "COMPLETE"]


def test_what_ended_before_a_kill_is_known_to_optuna_before_anything_new_is_drawn(tmp_path: Path) -> None:
    folder, sweep = SweepFolder(tmp_path), space(search="optuna")
    play(folder, sweep, 3)
    search = SweepSearch(folder, sweep)
    for index in range(3):  # all of them at once, as two trials at a time would be
        search.suggest(f"id{index}")
    assert search._optuna is not None
    assert [trial.state.name for trial in search._optuna.study.trials] == ["COMPLETE"] * 3
    search.on_trial_complete("id0", {"score": 0.0, "failed": ""})  # Ray Tune hears of it later
    assert search._optuna.study.trials[0].value == folder.trials()[0].judgements[-1].score

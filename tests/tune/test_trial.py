"""What a trial tells Ray Tune, without Ray: the training is replaced by what it would say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from malmen.config import Config
from malmen.platform.train import TrainedEditor
from malmen.tune.settings import parse_sweep
from malmen.tune.sweep import _Asha, _ended
from malmen.tune.sweep_folder import Judgement, SweepFolder, TrialRecord
from malmen.tune.trial import SweepTrial, _Run

STEPS = 3


def scores(step: int) -> dict[str, Any]:
    return {"edit_success": 0.1 * step}


def judgements(*steps: int) -> tuple[Judgement, ...]:
    return tuple(Judgement(step, 0.1 * step, scores(step), float(step)) for step in steps)


class ScriptedTrial(SweepTrial):
    """Its training reports what the test scripts."""

    says: tuple[Any, ...] = ()

    def start(self, run: _Run) -> _Run:
        for word in self.says:
            run.events.put(word)
        return run

    def _stop(self) -> None:
        """There is nothing to stop."""


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    found = SweepFolder(tmp_path / "sweep")
    sweep = parse_sweep({"layer_sets": ["last:1"], "score": ["edit_success"], "trial_seconds": 5}, "the test")
    found.begin(Config.model_validate({"training": {"steps": STEPS}}), sweep)
    return found


def make_trial(folder: SweepFolder, record: TrialRecord, *says: Any) -> ScriptedTrial:
    folder.put(record)
    trial = ScriptedTrial.__new__(ScriptedTrial)  # Ray Tune's own part is not needed
    trial.says = says
    trial.setup({"number": record.number}, sweep_folder=str(folder.path), parent=None)
    return trial


def trained(step: int = STEPS) -> TrainedEditor:
    return TrainedEditor("run", "checkpoint", step, scores(step), 1.0)


RECORD = TrialRecord(0, {"layers": "last:1"})


def test_a_trial_tells_every_evaluation_and_the_last_one_when_its_run_has_ended(folder: SweepFolder) -> None:
    trial = make_trial(folder, RECORD, *((step, scores(step)) for step in (1, 2, 3)), trained())
    found = [trial.step() for _ in range(3)]
    assert [(row["step"], row["done"], row["replayed"]) for row in found] == [
        (1, False, False),
        (2, False, False),
        (3, True, False),
    ]
    record = folder.get(0)
    assert record is not None and record.status == "finished"
    assert [judged.step for judged in record.judgements] == [1, 2, 3]


def test_a_trial_that_was_killed_between_its_last_evaluation_and_its_end_still_finishes(folder: SweepFolder) -> None:
    """To early stopping a last step that is not done would be one to stop at."""
    trial = make_trial(folder, replace(RECORD, judgements=judgements(1, 2, 3)), trained())
    found = [trial.step() for _ in range(3)]
    assert [(row["step"], row["done"], row["replayed"]) for row in found] == [
        (1, False, True),
        (2, False, True),
        (3, True, False),
    ]
    assert folder.trials()[0].status == "finished"
    assert folder.trials()[0].judgements == judgements(1, 2, 3)


def test_the_newest_evaluation_of_a_trial_under_way_may_not_have_been_judged(folder: SweepFolder) -> None:
    trial = make_trial(folder, replace(RECORD, judgements=judgements(1, 2)), (3, scores(3)), trained())
    assert [trial.step()["replayed"] for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_a_trial_that_has_ended_is_told_again_and_not_run(folder: SweepFolder, status: Any) -> None:
    trial = make_trial(folder, replace(RECORD, status=status, judgements=judgements(1, 2)), ValueError("it was run"))
    found = [trial.step() for _ in range(2)]
    assert [(row["score"], row["done"], row["replayed"]) for row in found] == [(0.1, False, True), (0.2, True, True)]


def test_a_trial_that_has_failed_ends_as_failed_again(folder: SweepFolder) -> None:
    trial = make_trial(folder, replace(RECORD, status="failed", why="it broke", judgements=judgements(1)))
    assert [(row["failed"], row["done"]) for row in (trial.step(), trial.step())] == [("", False), ("it broke", True)]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (ValueError("bad"), "ValueError: bad"),
        ((1, {"edit_success": float("nan")}), "step 1: the score is nan"),
        ((1, {"edit_success": None}), "step 1: the score is None"),
    ],
)
def test_whatever_goes_wrong_fails_the_trial_with_its_reason(folder: SweepFolder, word: Any, why: str) -> None:
    row = make_trial(folder, RECORD, word).step()
    assert why in row["failed"] and row["done"] and row["score"] == 0.0
    record = folder.get(0)
    assert record is not None and record.status == "failed" and why in record.why


def test_early_stopping_judges_what_is_new_against_what_was_told_and_never_what_was_told() -> None:
    asha = _Asha(time_attr="step", metric="score", mode="max", grace_period=1, max_t=9, reduction_factor=2)
    trials = [SimpleNamespace(trial_id=str(number)) for number in range(3)]

    def decide(number: int, score: float, replayed: bool) -> str:
        return asha.on_trial_result(None, trials[number], {"step": 1, "score": score, "replayed": replayed})

    for trial in trials:
        asha.on_trial_add(None, trial)  # type: ignore[arg-type]
    assert decide(0, 0.9, replayed=True) == "CONTINUE"
    assert decide(1, 0.3, replayed=True) == "CONTINUE"  # it had gone on before the sweep was killed
    assert decide(2, 0.4, replayed=False) == "STOP"


def test_only_the_trials_that_are_asked_for_count(folder: SweepFolder) -> None:
    for number in range(4):
        folder.put(TrialRecord(number, {}, "planned" if number == 1 else "finished"))
    assert [trial.number for trial in _ended(folder, 3)] == [0, 2]

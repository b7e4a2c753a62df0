from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from malmen.config import Config
from malmen.errors import EditError
from malmen.tune.settings import parse_sweep
from malmen.tune.sweep_folder import Judgement, SweepFolder, TrialRecord

SWEEP = parse_sweep({"layer_sets": ["last:1"]}, "the test")


def test_a_trial_comes_back_from_disk_as_it_was_put(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    trial = TrialRecord(0, {"layers": "last:1", "editor.rank": 4})
    later = replace(trial.judged(Judgement(5, 0.5, {"edit_success": 0.5}, 1.5)), status="failed", why="because")
    for one in (trial, later):
        folder.put(one)
        assert folder.get(0) == one
    assert folder.trials() == [later]
    assert folder.get(1) is None
    assert not trial.ended and later.ended
    assert trial.last is None and later.last == Judgement(5, 0.5, {"edit_success": 0.5}, 1.5)


def test_a_sweep_begins_once_and_is_gone_on_with_by_the_same_config_and_space(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "sweep")
    assert folder.begin(Config(), SWEEP) == {}
    folder.save(Config(), SWEEP, {"mlflow_run": "abc"})
    assert folder.begin(Config(), SWEEP) == {"mlflow_run": "abc"}
    more = SWEEP.model_copy(update={"trials": 40, "concurrent": 3})
    elsewhere = Config.model_validate({"cluster": {"lm_workers": 4}})
    assert folder.begin(elsewhere, more) == {"mlflow_run": "abc"}
    assert folder.load()[:2] == (elsewhere, more)
    assert folder.begin(elsewhere, more, "these rows") == {"mlflow_run": "abc", "data": "these rows"}
    with pytest.raises(EditError, match=r"another data \(fingerprint these rows → other rows\)"):
        folder.begin(elsewhere, more, "other rows")


@pytest.mark.parametrize(
    ("config", "sweep", "said"),
    [
        ({"training": {"steps": 7}}, {}, "training.steps (1000 → 7)"),
        ({"seed": 1}, {}, "seed (0 → 1)"),
        ({}, {"layer_sets": ["last:2"]}, "sweep.layer_sets"),
        ({}, {"score": ["edit_success"]}, "sweep.score"),
        ({}, {"seed": 3}, "sweep.seed"),
    ],
)
def test_another_config_or_space_does_not_go_on_with_a_sweep(
    tmp_path: Path, config: dict[str, object], sweep: dict[str, object], said: str
) -> None:
    folder = SweepFolder(tmp_path / "sweep")
    folder.begin(Config(), SWEEP)
    with pytest.raises(EditError) as found:
        folder.begin(Config.model_validate(config), parse_sweep({**SWEEP.model_dump(), **sweep}, "the test"))
    assert said in str(found.value)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(EditError, match=r"holds no sweep\.json"):
        SweepFolder(tmp_path).begin(Config(), SWEEP)
    with pytest.raises(EditError, match="holds no sweep"):
        SweepFolder(tmp_path).load()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_records_that_cannot_be_read_say_which(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(EditError, match=r"sweep\.json is not the file of a sweep"):
        folder.load()
    folder.put(TrialRecord(0, {}))
    (folder.trial_path(0) / "trial.json").write_text('{"number": 0}')
    with pytest.raises(EditError, match=r"trial-0000/trial\.json is not the record of a trial"):
        folder.get(0)

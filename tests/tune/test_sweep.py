"""A sweep on a real Ray that is killed and goes on: what a trial is worth, what fails, what is left behind."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from markupsafe import escape
from mlflow import MlflowClient
from platform_runs import make_platform_config
from processes import start_driver, wait_until, wait_until_nobody_works
from torch.testing import assert_close

from malmen.config import Config
from malmen.data.splits import validation_records
from malmen.errors import EditError, UsageError
from malmen.lm.model import load_lm
from malmen.platform.tracking.registry import download_editor
from malmen.runs.checkpoint import load_editor
from malmen.runs.checkpoint_lookup import latest_checkpoint
from malmen.training import evaluate_editor
from malmen.training import train as train_alone
from malmen.tune.settings import SweepConfig, parse_sweep
from malmen.tune.space import with_evaluations
from malmen.tune.sweep import SweepResult, sweep
from malmen.tune.sweep_folder import SweepFolder, TrialRecord
from malmen.tune.trial import trial_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

COEF, EDIT_LR = "training.locality_coef", "editor.edit_lr"
SOUND = {"layers": "last:2", COEF: 0.5, EDIT_LR: 0.01}
WEAK = {"layers": "last:1", COEF: 2.0, EDIT_LR: 1e4}  # changes everything, so early stopping ends it
TRIALS: list[dict[str, Any]] = [SOUND, SOUND, SOUND, SOUND, SOUND, WEAK]  # the third to fifth are UnsoundTrial's


def make_space(**changes: Any) -> SweepConfig:
    raw = {
        "trials": len(TRIALS),
        "search": "grid",
        "layer_sets": ["last:1", "last:2"],
        "parameters": {COEF: [0.5, 2.0], EDIT_LR: [0.01, 1e4]},
        "score": ["locality_agreement"],
        "concurrent": 2,
    }
    return parse_sweep({**raw, **changes}, "the test")


def make_config(home: Path) -> Config:
    store = {"enabled": True, "uri": f"sqlite:///{home / 'mlflow.db'}"}
    return make_platform_config("gpt2", home, training={"steps": 4, "eval_every": 1}, tracking=store)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture(scope="module")
def swept(home: Path, request: pytest.FixtureRequest) -> SweepResult:
    """Killed while its second trial runs, one at a time; the same command, two at a time, does the rest."""
    from unsound_trials import UnsoundTrial

    request.getfixturevalue("ray_cluster")
    config, space, folder = make_config(home), make_space(), SweepFolder(home / "sweep")
    folder.begin(with_evaluations(config, space)[0], space)
    for number, params in enumerate(TRIALS):
        folder.put(TrialRecord(number, params))
    for name, settings in (("config", config), ("space", space)):
        (home / f"{name}.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    command = [sys.executable, "-m", "malmen.tune.sweep", "config.yaml", "sweep.concurrent=1"]
    driver = start_driver([*command, "--space", "space.yaml", "--out", "sweep"], home)
    try:
        wait_until(lambda: is_under_way(folder, 1), "the second trial", 150, driver)
    finally:
        driver.kill()
        driver.wait(30)
    (home / "ended.json").write_text(json.dumps(times_of(folder.trial_path(0))))
    (home / "noted.json").write_text((folder.trial_path(0) / "trial.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("malmen.tune.sweep.SweepTrial", UnsoundTrial)
        return sweep(config, space, folder.path)


def is_under_way(folder: SweepFolder, number: int) -> bool:
    """Whether this trial has been evaluated and has not ended."""
    trial = folder.get(number)
    return trial is not None and not trial.ended and trial.last is not None


def times_of(folder: Path) -> dict[str, int]:
    """When each file of a run was written; the sweep's own note of it is written again with the same words."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "trial.json"]
    return {str(path): path.stat().st_mtime_ns for path in files}


def runs(home: Path) -> dict[str, Any]:
    """The MLflow runs by name: the sweep's own, and its trials'."""
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("malmen")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert len({run.info.run_name for run in found}) == len(found)
    return {run.info.run_name: run for run in found}


def known(scores: dict[str, Any]) -> dict[str, float]:
    """What was measured."""
    return {name: value for name, value in scores.items() if value is not None}


def test_trials_that_fail_are_reported_and_do_not_end_the_sweep(swept: SweepResult) -> None:
    assert [trial.status for trial in swept.trials] == ["finished", "finished", "failed", "failed", "failed", "stopped"]
    senseless, gone, hung = (trial.why for trial in swept.trials[2:5])
    assert "step 1: the score is nan" in senseless
    assert "/nowhere/model" in gone
    assert "longer than trial_seconds=1" in hung
    page = swept.report.read_text(encoding="utf-8")
    assert all(str(escape(trial.why)) in page for trial in swept.trials[2:])


def test_early_stopping_ends_a_weak_trial_at_its_first_rung(swept: SweepResult) -> None:
    """It is judged against the trials that were evaluated before the sweep was killed."""
    weak = swept.trials[5]
    assert [judged.step for judged in weak.judgements] == [1] and "step 1" in weak.why
    assert weak.judgements[0].score < swept.trials[0].judgements[0].score


@pytest.mark.parametrize("number", [0, 1])
def test_no_evaluation_of_a_killed_sweep_is_lost_and_no_step_is_counted_twice(swept: SweepResult, number: int) -> None:
    assert [judged.step for judged in swept.trials[number].judgements] == [1, 2, 3, 4]
    rows = (swept.folder / "trials" / f"trial-{number:04d}" / "history.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(row)["step"] for row in rows if "meta_loss" in row]
    assert steps == [1, 2, 3, 4]


def test_a_trial_that_had_ended_before_the_sweep_was_killed_was_not_touched_again(
    swept: SweepResult, home: Path
) -> None:
    ended = json.loads((home / "ended.json").read_text())
    assert any("checkpoint-0000004" in path for path in ended)
    assert times_of(swept.folder / "trials" / "trial-0000") == ended
    assert json.loads((home / "noted.json").read_text()) == json.loads(json.dumps(asdict(swept.trials[0])))


def test_a_trial_equals_the_same_training_by_itself(swept: SweepResult, tmp_path: Path) -> None:
    base, space, _ = SweepFolder(swept.folder).load()
    config = trial_config(base, space, SOUND)
    raw = config.model_dump(mode="json")
    raw["batch"]["cache_dir"] = None
    alone = train_alone(Config.model_validate(raw), tmp_path / "alone")
    found = load_editor(latest_checkpoint(swept.folder / "trials" / "trial-0000"), optimizer=True)
    assert found.steps_done == alone.editor.steps_done == 4
    assert_close(dict(found.state_dict()), dict(alone.editor.state_dict()), rtol=1e-9, atol=1e-9)
    scores = evaluate_editor(alone.lm, alone.editor, validation_records(config), config, generate=False).scores()
    last = swept.trials[0].last
    assert last is not None
    assert_close(known(last.scores), known(scores), rtol=1e-9, atol=1e-9)


def test_mlflow_holds_one_ended_run_for_each_trial_below_the_sweeps(swept: SweepResult, home: Path) -> None:
    found = runs(home)
    parent = found.pop("sweep")
    assert parent.info.run_id == swept.tracking_run and parent.info.status == "FINISHED"
    # Of those that failed, one raised before its training had a run, and the others never began one.
    assert {name: run.info.status for name, run in found.items()} == {
        "trial-0000": "FINISHED", "trial-0001": "FINISHED", "trial-0002": "FAILED", "trial-0003": "FAILED",
        "trial-0004": "FAILED", "trial-0005": "FINISHED",
    }  # fmt: skip
    assert all(run.data.tags["mlflow.parentRunId"] == parent.info.run_id for run in found.values())
    assert {found[f"trial-{trial.number:04d}"].info.run_id for trial in swept.trials} == {
        trial.tracking_run for trial in swept.trials
    }
    assert "/nowhere/model" in found["trial-0003"].data.tags["sweep.why"]
    for number, status in ((0, "finished"), (1, "finished"), (5, "stopped")):
        run = found[f"trial-{number:04d}"]
        assert (run.data.tags["sweep.status"], run.data.tags["sweep.layers"]) == (status, TRIALS[number]["layers"])
        assert run.data.metrics["sweep/score"] == pytest.approx(swept.trials[number].last.score)  # type: ignore[union-attr]
        assert run.data.params["training.locality_coef"] == str(TRIALS[number][COEF])


def test_the_champion_from_the_registry_edits_like_its_trial(swept: SweepResult, home: Path) -> None:
    assert (swept.champion.number, swept.champion.version) == (0, "1")
    assert swept.champion.uri == "models:/malmen-gpt2@champion"
    folder = download_editor(swept.champion.uri, f"sqlite:///{home / 'mlflow.db'}")
    base, space, _ = SweepFolder(swept.folder).load()
    config = trial_config(base, space, SOUND)
    lm = load_lm(config.model)
    scores = evaluate_editor(lm, load_editor(folder, lm), validation_records(config), config, generate=False).scores()
    last = swept.trials[0].last
    assert last is not None
    assert_close(known(scores), known(last.scores), rtol=1e-9, atol=1e-9)


def test_a_sweep_that_has_ended_is_not_run_again(swept: SweepResult, home: Path) -> None:
    """Only what comes after the trials is done once more; the registry still has one version."""
    before = {path: path.stat().st_mtime_ns for path in swept.folder.glob("trials/**/*")}
    again = sweep(make_config(home), make_space(), swept.folder)
    assert (again.trials, again.champion) == (swept.trials, swept.champion)
    assert {path: path.stat().st_mtime_ns for path in swept.folder.glob("trials/**/*")} == before
    assert "RUNNING" not in {run.info.status for run in runs(home).values()}


def test_the_best_trial_can_be_trained_again_for_longer_and_takes_over_the_alias(
    swept: SweepResult, home: Path
) -> None:
    again = sweep(make_config(home), make_space(retrain_steps=5), swept.folder)
    assert again.trials == swept.trials
    assert (again.champion.number, again.champion.steps, again.champion.version) == (0, 5, "2")
    folder = download_editor("models:/malmen-gpt2@champion", f"sqlite:///{home / 'mlflow.db'}")
    assert load_editor(folder).steps_done == 5
    retrained = runs(home)["champion-0000-5"]
    assert retrained.info.status == "FINISHED"
    assert retrained.data.tags["mlflow.parentRunId"] == swept.tracking_run


def test_nothing_of_a_sweep_is_left_running(swept: SweepResult) -> None:
    wait_until_nobody_works()


def test_a_space_that_does_not_fit_the_model_is_an_error_before_anything_is_written(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layer set 'last:9'"):
        sweep(make_config(home), make_space(layer_sets=["last:9"]), tmp_path / "sweep")
    config = make_config(home)
    gone = config.model_copy(update={"data": config.data.model_copy(update={"train": "/nowhere.jsonl"})})
    with pytest.raises(EditError, match=r"cannot read the data file '/nowhere\.jsonl'"):
        sweep(gone, make_space(), tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()

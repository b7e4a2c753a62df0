from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import make_config

from malmen.config import Config, absolute_paths
from malmen.errors import EditError
from malmen.runs.run_folder import HISTORY, RunFolder, run_evaluations


def save(run: Path, config: Config, step: int) -> None:
    checkpoint = run / f"checkpoint-{step:07d}"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(config.model_dump_json())
    (checkpoint / "state.json").write_text(json.dumps({"format": 1, "step": step, "scores": {}}))


def test_nothing_is_written_before_a_run_begins(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", make_config())
    assert not (tmp_path / "run").exists()
    folder.begin({"mlflow_run": "abc"})
    again = RunFolder.open(tmp_path / "run", make_config())
    assert (again.facts, again.steps_done) == ({"mlflow_run": "abc"}, 0)


def test_a_run_that_failed_before_its_first_step_binds_nobody(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, make_config(num_edits=10**6)).begin({"mlflow_run": "abc"})
    assert RunFolder.open(tmp_path, make_config()).facts == {}


def test_a_run_under_way_takes_no_other_config_except_what_changes_no_result(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config())
    folder.begin()
    folder.add({"step": 1})
    with pytest.raises(EditError, match=r"training\.meta_lr \(0\.001 → 0\.5\)"):
        RunFolder.open(tmp_path, make_config(meta_lr=0.5))
    config = make_config().model_copy(update={"batch": make_config().batch.model_copy(update={"token_budget": 7})})
    again = RunFolder.open(tmp_path, config)
    again.cut(again.steps_done)  # no checkpoint yet: the step will be run again
    assert again.history == [] and (tmp_path / HISTORY).read_text() == ""


def test_a_run_that_could_not_register_its_editor_is_not_finished(tmp_path: Path) -> None:
    config = make_config(steps=4, schedule="constant")
    RunFolder.open(tmp_path, config).begin({"finished": False})
    save(tmp_path, config, step=4)
    again = RunFolder.open(tmp_path, config)
    assert again.steps_done == 4
    with pytest.raises(EditError, match="already holds a finished run of 4 steps"):
        RunFolder.open(tmp_path, make_config(steps=3, schedule="constant"))
    again.begin({"finished": True})
    with pytest.raises(EditError, match="already holds a finished run of 4 steps"):
        RunFolder.open(tmp_path, config)


def test_a_run_under_way_takes_no_other_data(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config())
    folder.check_data("before")
    folder.begin()
    RunFolder.open(tmp_path, make_config()).check_data("after")  # nothing was trained on them yet
    save(tmp_path, make_config(), step=4)
    again = RunFolder.open(tmp_path, make_config())
    again.check_data("before")
    with pytest.raises(EditError, match=r"the data have changed .* before → after"):
        again.check_data("after")


def test_a_path_and_the_same_path_written_whole_are_no_other_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    config = make_config()
    data = config.data.model_copy(update={"train": "rows.jsonl"})
    config = config.model_copy(update={"data": data})
    folder = RunFolder.open(tmp_path / "run", config)
    folder.check_data("the rows")
    folder.begin()
    save(tmp_path / "run", config, step=4)
    assert RunFolder.open(tmp_path / "run", absolute_paths(config)).steps_done == 4
    assert absolute_paths(config).data.train == str(tmp_path / "rows.jsonl") and config.model.name == "builtin"


def test_resuming_wants_a_run(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="holds no run to resume"):
        RunFolder.open(tmp_path, make_config(), resume=True)


def test_what_is_no_run_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / HISTORY).write_text("somebody's")
    with pytest.raises(EditError, match="choose another --out"):
        RunFolder.open(tmp_path, make_config())
    (tmp_path / "run.json").write_text("not JSON")
    with pytest.raises(EditError, match="is not JSON"):
        RunFolder.open(tmp_path, make_config())
    assert (tmp_path / HISTORY).read_text() == "somebody's"


def test_the_evaluations_that_a_run_will_not_make_again_are_known_even_if_its_driver_never_heard(
    tmp_path: Path,
) -> None:
    folder = RunFolder.open(tmp_path, make_config())
    folder.begin()
    assert run_evaluations(tmp_path) == []
    for step in (1, 2, 6):
        folder.add({"step": step, "scores": {"edit_success": step / 10}})
    for step in (3, 4, 5):  # the last one was saved and not measured yet
        checkpoint = tmp_path / f"checkpoint-000000{step}"
        checkpoint.mkdir()
        scores = {"edit_success": step / 10} if step < 5 else {}
        (checkpoint / "state.json").write_text(json.dumps({"format": 1, "step": step, "scores": scores}))
    assert run_evaluations(tmp_path) == [(step, {"edit_success": step / 10}) for step in (1, 2, 3, 4)]

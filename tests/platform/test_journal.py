from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from malmen.config import Config
from malmen.errors import EditError, UsageError
from malmen.platform.events import Began, Evaluated, Failed, Lost, Saved, Saving, StepDone
from malmen.platform.tracking.tracker import Tracker
from malmen.platform.train import Journal, Listener
from malmen.runs.run_folder import HISTORY, RunFolder
from malmen.runs.storage import RunStore


def make_journal(place: str | Path, listener: Listener | None = None, **cluster: Any) -> Journal:
    config = Config.model_validate({"cluster": cluster})
    return Journal(RunFolder(RunStore(place), config, None, 0), Tracker(config), listener or Listener())


def step_done(step: int, loss: float = 0.5) -> StepDone:
    return StepDone(step, loss, loss, loss, 1.0, {}, 0, 0.0, loss, {}, {}, [], 1.0)


def test_steps_and_evaluations_that_are_repeated_after_a_loss_count_once(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []
    listener = Listener(
        step=lambda step, _report: heard.append(("step", step)),
        evaluation=lambda step, _scores: heard.append(("evaluation", step)),
    )
    journal = make_journal(tmp_path, listener)
    scores = {"edit_success": 0.5}
    journal.write(Began(0))
    for event in (
        step_done(1),
        Evaluated(1, scores, []),
        Began(0),
        step_done(1),
        Evaluated(1, scores, []),
        step_done(2),
    ):
        journal.write(event)
    assert heard == [("step", 1), ("evaluation", 1), ("step", 2)]
    rows = [json.loads(line) for line in (tmp_path / HISTORY).read_text().splitlines()]
    assert [(row["step"], "scores" in row) for row in rows] == [(1, False), (1, True), (2, False)]


def test_a_run_that_hardly_learns_says_so(tmp_path: Path) -> None:
    heard: list[str] = []
    journal = make_journal(tmp_path, Listener(event=heard.append))
    for step in range(1, 30):
        journal.write(step_done(step))
    assert len(heard) == 1 and heard[0].startswith("after 20 steps, η has changed by")


def test_only_the_first_beginning_cuts_the_history(tmp_path: Path) -> None:
    """A killed driver may have written steps that it did not save; ranks that begin again repeat what is written."""
    journal = make_journal(tmp_path)
    for step in (1, 2, 3):
        journal.folder.add({"step": step, "meta_loss": 0.5})
    journal.write(Began(2))
    assert journal.step == 2
    journal.write(Began(0))
    assert journal.step == 2


@pytest.mark.parametrize(("role", "other"), [("hypernet actors", "LM workers"), ("LM workers", "hypernet actors")])
def test_a_run_survives_as_many_losses_of_a_role_between_two_steps_as_max_failures_says(
    role: str, other: str, tmp_path: Path
) -> None:
    messages: list[str] = []
    journal = make_journal(tmp_path, Listener(event=messages.append), max_failures=2)
    for step in (1, 2, 3):  # more than max_failures in all, but not between two steps
        journal.write(Lost(role, "out of memory"))
        journal.write(Lost(role, "out of memory"))
        journal.write(step_done(step))
    assert messages[0] == f"after step 0: {role} were lost (out of memory); restoring them" and len(messages) == 6
    journal.write(Lost(role, "out of memory"))
    journal.write(Lost(other, "a node is gone"))  # takes away from nothing but its own role's number
    journal.write(step_done(2))  # done before: no progress
    journal.write(Lost(role, "out of memory"))
    expected = rf"{role} were lost 3 times before step 4 was done, more than cluster.max_failures=2; .*out of memory"
    with pytest.raises(EditError, match=expected):
        journal.write(Lost(role, "out of memory"))


def test_without_failures_allowed_the_first_loss_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="LM workers were lost 1 times before step 1"):
        make_journal(tmp_path, max_failures=0).write(Lost("LM workers", "killed"))


def test_a_ranks_error_is_the_runs_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such layer"):
        make_journal(tmp_path).write(Failed(UsageError("no such layer")))


def test_a_driver_that_does_not_see_the_checkpoints_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("malmen.platform.places.VISIBLE_SECONDS", 0.0)
    journal = make_journal(tmp_path)
    with pytest.raises(EditError, match="a folder that all nodes share"):
        journal.write(Saved(3))
    with RunStore(tmp_path).publish("checkpoint-0000003") as folder:
        (folder / "state.json").write_text("{}")
    journal.write(Saved(3))


def test_a_storage_that_cannot_be_appended_to_has_the_history_before_what_follows_from_it() -> None:
    journal = make_journal("memory://journal/run")
    store = journal.folder.store
    journal.write(step_done(1))
    journal.write(Saving(1))
    assert len(store.read_text(HISTORY).splitlines()) == 1
    journal.write(Evaluated(1, {"edit_success": 0.5}, []))
    assert len(store.read_text(HISTORY).splitlines()) == 2

"""Runs on the built-in world: resumption, reproducibility, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import make_config
from torch.testing import assert_close

from malmen.config import ModelConfig
from malmen.data.world import world_records
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, load_lm
from malmen.metrics import score
from malmen.runs.checkpoint import load_editor
from malmen.runs.checkpoint_lookup import read_state
from malmen.runs.run_folder import RunFolder
from malmen.runs.storage import RunStore
from malmen.training import TrainingRun, evaluate_editor, evaluate_sets, make_editor, train


class Stopped(Exception):
    pass


def _stop_at(step: int) -> Callable[[int, object], None]:
    def on_step(now: int, _report: object) -> None:
        if now == step:
            raise Stopped

    return on_step


@pytest.fixture(scope="module")
def whole(lm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run that nothing interrupted."""
    return train(make_config(locality_target=0.01), tmp_path_factory.mktemp("whole"), lm=lm)


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [1, 4, 5])
def test_a_killed_and_resumed_run_ends_in_the_same_editor(
    lm: LanguageModel, whole: TrainingRun, tmp_path: Path, killed_at: int
) -> None:
    with pytest.raises(Stopped):
        train(make_config(locality_target=0.01), tmp_path, lm=lm, on_step=_stop_at(killed_at))
    torch.manual_seed(99)  # whatever the process did in between
    resumed = train(make_config(locality_target=0.01), tmp_path, lm=lm)  # the same command
    assert [row["step"] for row in resumed.history] == [1, 2, 3, 4, 5, 6]
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for name, value in whole.editor.state_dict().items():
        assert torch.equal(resumed.editor.state_dict()[name], value), name


@pytest.mark.slow
def test_a_resumed_run_and_its_editor_know_the_keys_that_are_preserved(lm: LanguageModel, tmp_path: Path) -> None:
    config = make_config()
    settings = {"preserved_weight": 30.0, "preserved_facts": 20}
    config = config.model_copy(update={"editor": config.editor.model_copy(update=settings)})
    whole = train(config, tmp_path / "whole", lm=lm)
    with pytest.raises(Stopped):
        train(config, tmp_path / "killed", lm=lm, on_step=_stop_at(3))
    resumed = train(config, tmp_path / "killed", lm=lm)
    facts = [record.edit for record in world_records("validation")[:4]]
    expected, without = whole.editor.edit(lm, facts).shifts, train(make_config(), tmp_path / "plain", lm=lm)
    for editor in (resumed.editor, load_editor(tmp_path / "killed", lm)):
        assert all(torch.equal(shift, expected[name]) for name, shift in editor.edit(lm, facts).shifts.items())
    assert not any(
        torch.allclose(expected[name], shift) for name, shift in without.editor.edit(lm, facts).shifts.items()
    )


@pytest.mark.slow
def test_what_was_measured_is_saved_so_that_the_best_is_kept(lm: LanguageModel, tmp_path: Path) -> None:
    config = make_config(eval_every=1, checkpoint_every=100, keep_checkpoints=1, meta_lr=0.3)
    run = train(config, tmp_path, lm=lm)
    scores = {row["step"]: score(row["scores"]) for row in run.history if row.get("scores")}
    best = max(scores, key=lambda step: (scores[step], step))
    kept = [int(name[-7:]) for name in RunStore(tmp_path).checkpoints()]
    assert kept == sorted({best, 6}) and set(scores) == {1, 2, 3, 4, 5}


@pytest.mark.slow
def test_an_evaluation_that_fails_costs_no_steps_and_is_made_when_the_run_goes_on(
    lm: LanguageModel, tmp_path: Path
) -> None:
    config = make_config(eval_every=2, checkpoint_every=100)
    with pytest.raises(Stopped):
        train(config, tmp_path / "killed", lm=lm, on_evaluation=_stop_at(4))
    assert RunStore(tmp_path / "killed").checkpoints() == ["checkpoint-0000002", "checkpoint-0000004"]
    done: list[int] = []
    resumed = train(config, tmp_path / "killed", lm=lm, on_step=lambda step, _report: done.append(step))
    assert done == [5, 6]
    plain = train(config, tmp_path / "plain", lm=lm)
    for run in (resumed, plain):
        assert [row["step"] for row in run.history if "meta_loss" in row] == [1, 2, 3, 4, 5, 6]
        assert [row["step"] for row in run.history if "scores" in row] == [2, 4]
    assert resumed.history[5]["scores"] == plain.history[5]["scores"] != plain.history[2]["scores"]


@pytest.mark.slow
@pytest.mark.parametrize("written", [False, True])
def test_an_evaluation_that_is_killed_before_the_checkpoint_has_its_scores_is_in_the_history_once(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    def add(self: RunFolder, row: dict[str, Any]) -> None:
        fatal = row["step"] == 4 and "scores" in row
        if written or not fatal:
            original(self, row)
        if fatal:
            raise Stopped

    config, original = make_config(eval_every=2), RunFolder.add
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(RunFolder, "add", add)
        train(config, tmp_path, lm=lm)
    assert read_state(tmp_path)["scores"] == {}
    resumed = train(config, tmp_path, lm=lm)
    scores = {row["step"]: row["scores"] for row in resumed.history if "scores" in row}
    assert [row["step"] for row in resumed.history if "scores" in row] == [2, 4]
    assert read_state(tmp_path / "checkpoint-0000004")["scores"] == scores[4]


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(lm: LanguageModel, tmp_path: Path) -> None:
    run = train(make_config(steps=1), tmp_path, lm=lm)
    again = train(make_config(steps=1), tmp_path, lm=lm, resume=True)
    assert [row["step"] for row in again.history] == [1]
    for name, value in run.editor.state_dict().items():
        assert torch.equal(again.editor.state_dict()[name], value), name


@pytest.mark.slow
def test_a_run_is_determined_by_its_seed(lm: LanguageModel, tmp_path: Path) -> None:
    one, two = (train(make_config(steps=2), tmp_path / name, lm=lm) for name in ("one", "two"))
    other = train(make_config(steps=2).model_copy(update={"seed": 1}), tmp_path / "other", lm=lm)
    for name, value in one.editor.state_dict().items():
        assert torch.equal(two.editor.state_dict()[name], value)
    assert any(
        not torch.equal(other.editor.state_dict()[name], value) for name, value in one.editor.state_dict().items()
    )


def test_resuming_with_another_config_is_refused_and_names_the_keys(lm: LanguageModel, tmp_path: Path) -> None:
    train(make_config(steps=1), tmp_path, lm=lm)
    with pytest.raises(EditError, match=r"training\.meta_lr \(0\.001 → 0\.5\)"):
        train(make_config(steps=1, meta_lr=0.5), tmp_path, lm=lm, resume=True)


def test_a_run_is_not_overwritten(lm: LanguageModel, tmp_path: Path) -> None:
    train(make_config(steps=1), tmp_path, lm=lm)
    with pytest.raises(EditError, match="already holds a finished run"):
        train(make_config(steps=1), tmp_path, lm=lm)


@pytest.mark.slow
def test_several_sets_of_edits_are_disjoint_and_each_is_laid_over_the_unedited_model(lm: LanguageModel) -> None:
    config, records = make_config(), world_records("validation")
    editor = make_editor(lm, config)
    sets = evaluate_sets(lm, editor, records, config, sets=3, edits=4, generate=False)
    prompts = [fact.prompt for found in sets for fact in found.facts if fact.role == "edit"]
    assert len(prompts) == len(set(prompts)) == 12
    alone = evaluate_editor(lm, editor, records[8:], config, edits=4, generate=False)
    assert sets[2].scores() == alone.scores()


def test_more_held_out_edits_than_records_is_refused_before_the_first_step(lm: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(EditError, match=r"800 held-out edits .* only 768 different records"):
        train(make_config(eval_edits=800), tmp_path / "run", lm=lm)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_finds_the_lms_work_in_a_folder_ends_where_it_would_without(tmp_path: Path) -> None:
    """The first run fills the folder; one with another coefficient adds nothing to it, and equals one without."""
    lm_config, cache = ModelConfig(dtype="float64"), tmp_path / "cache"
    lm = load_lm(lm_config)

    def run(name: str, coef: float, cache_dir: str | None) -> TrainingRun:
        plain = make_config(locality_coef=coef)
        batch = plain.batch.model_copy(update={"cache_dir": cache_dir})
        return train(plain.model_copy(update={"model": lm_config, "batch": batch}), tmp_path / name, lm=lm)

    def size() -> int:
        return sum(file.stat().st_size for file in cache.rglob("*.bin"))

    run("first", 1.0, str(cache))
    filled = size()
    found, expected = run("second", 0.3, str(cache)), run("without", 0.3, None)
    assert 0 < filled == size()
    # 1e-12 is 1e-9 of an Adam step of 1e-3, by which rounding grows where a gradient is near zero.
    assert_close(dict(found.editor.state_dict()), dict(expected.editor.state_dict()), rtol=1e-9, atol=1e-12)

"""Runs on the built-in world: resumption, sampling, checkpoints, evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from malmen.checkpoint import latest_checkpoint, load_edit, load_editor, read_config, save_edit
from malmen.config import Config
from malmen.data.world import world_records
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.facts import fact_encoder
from malmen.lm import LanguageModel, load_lm
from malmen.sampling import Sampler, compatible_records, training_records, unrelated_to_all
from malmen.training import evaluate_editor, make_editor, train


def make_config(**training: object) -> Config:
    return Config.model_validate(
        {
            "editor": {"layers": "last:2", "rank": 8, "edit_lr": 1e-3},
            "training": {
                "num_edits": 5,
                "steps": 6,
                "meta_lr": 1e-3,
                "schedule": "cosine",
                "checkpoint_every": 2,
                **training,
            },
        }
    )


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return load_lm(make_config().model)


class Stopped(Exception):
    pass


def _stop_at(step: int):
    def on_step(now: int, _report: object) -> None:
        if now == step:
            raise Stopped

    return on_step


@pytest.mark.parametrize("killed_at", [1, 4, 5])
def test_a_killed_and_resumed_run_ends_in_the_same_editor(lm: LanguageModel, tmp_path: Path, killed_at: int) -> None:
    config = make_config()
    whole = train(config, tmp_path / "whole", lm=lm)
    with pytest.raises(Stopped):
        train(config, tmp_path / "cut", lm=lm, on_step=_stop_at(killed_at))
    torch.manual_seed(99)  # whatever the process did in between
    resumed = train(config, tmp_path / "cut", lm=lm, resume=True)
    assert [row["step"] for row in resumed.history] == [1, 2, 3, 4, 5, 6]
    for name, value in whole.editor.state_dict().items():
        assert_close(resumed.editor.state_dict()[name], value, rtol=0, atol=0)


def test_a_run_is_determined_by_its_seed(lm: LanguageModel, tmp_path: Path) -> None:
    one, two = (train(make_config(steps=2), tmp_path / name, lm=lm) for name in ("one", "two"))
    other = train(make_config(steps=2).model_copy(update={"seed": 1}), tmp_path / "other", lm=lm)
    for name, value in one.editor.state_dict().items():
        assert torch.equal(two.editor.state_dict()[name], value)
    assert any(
        not torch.equal(other.editor.state_dict()[name], value) for name, value in one.editor.state_dict().items()
    )


def test_resuming_with_another_config_is_refused_and_names_the_keys(lm: LanguageModel, tmp_path: Path) -> None:
    train(make_config(steps=2), tmp_path, lm=lm)
    with pytest.raises(EditError, match=r"training\.meta_lr \(0\.001 → 0\.5\)"):
        train(make_config(steps=2, meta_lr=0.5), tmp_path, lm=lm, resume=True)


def test_a_run_is_not_overwritten(lm: LanguageModel, tmp_path: Path) -> None:
    train(make_config(steps=1), tmp_path, lm=lm)
    with pytest.raises(EditError, match="already holds a run"):
        train(make_config(steps=1), tmp_path, lm=lm)


def test_a_checkpoint_holds_the_config_and_edits_like_the_run_did(lm: LanguageModel, tmp_path: Path) -> None:
    run = train(make_config(), tmp_path, lm=lm)
    loaded = Editor.from_pretrained(tmp_path, lm)
    assert read_config(tmp_path) == make_config()
    facts = [record.edit for record in world_records("validation")[:3]]
    shifts = loaded.edit(lm, facts).shifts
    for name, shift in run.editor.edit(lm, facts).shifts.items():
        assert torch.equal(shifts[name], shift)


def test_only_the_newest_two_checkpoints_are_kept(lm: LanguageModel, tmp_path: Path) -> None:
    train(make_config(), tmp_path, lm=lm)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-0000004", "checkpoint-0000006"]


def test_an_editor_of_another_model_is_refused(lm: LanguageModel, tmp_path: Path) -> None:
    train(make_config(steps=1), tmp_path, lm=lm)
    other = load_lm(make_config().model)
    with torch.no_grad():
        other.model.get_parameter("transformer.wte.weight").mul_(1.5)
    with pytest.raises(EditError, match="works only on the weights it was trained for"):
        Editor.from_pretrained(tmp_path, other)


def test_a_truncated_checkpoint_is_refused_with_its_name(lm: LanguageModel, tmp_path: Path) -> None:
    train(make_config(steps=1), tmp_path, lm=lm)
    file = latest_checkpoint(tmp_path) / "editor.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(EditError, match=r"editor\.safetensors.*damaged"):
        load_editor(tmp_path)


def test_a_folder_without_an_editor_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="holds no trained editor"):
        load_editor(tmp_path)


def test_an_edit_is_saved_whole_and_refused_for_another_model(lm: LanguageModel, tmp_path: Path) -> None:
    folder = tmp_path / "edit"
    for scale in (1.0, 2.0):  # the second replaces the first
        save_edit(folder, {"a": torch.full((2, 3), scale)}, {"base_model": lm.fingerprint()})
    shifts, _ = load_edit(folder, lm)
    assert_close(shifts["a"], torch.full((2, 3), 2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["edit"]
    save_edit(folder, {"a": torch.zeros(1)}, {"base_model": "other"})
    with pytest.raises(EditError, match="belongs to base model other"):
        load_edit(folder, lm)


def test_a_step_can_be_drawn_again_by_its_number(lm: LanguageModel) -> None:
    config = make_config()

    def fresh() -> Sampler:
        return Sampler(config, fact_encoder(lm, config.data), training_records(config))

    walked = fresh()
    batches = [walked.batch(step) for step in range(4)]
    assert fresh().batch(3) == batches[3]
    assert batches[2] != batches[3]


def test_an_epoch_uses_no_record_twice(lm: LanguageModel) -> None:
    config = make_config(num_edits=100)
    sampler = Sampler(config, fact_encoder(lm, config.data), training_records(config))
    ids = [name for step in range(sampler.steps_per_epoch) for name in sampler.batch(step).record_ids]
    assert len(ids) == len(set(ids)) == 1100


def test_unrelated_tuples_that_another_record_edits_are_left_out() -> None:
    records = world_records("validation")[:200]
    edited = {fact.prompt for record in records for fact in (record.edit, *record.equivalents)}
    assert any(fact.prompt in edited for record in records for fact in record.unrelated)
    assert not any(fact.prompt in edited for facts in unrelated_to_all(records) for fact in facts)


def test_records_that_edit_the_same_prompt_do_not_meet() -> None:
    records = world_records("validation")[:5]
    assert compatible_records(records * 2, 8) == records


def test_more_edits_than_records_is_a_clear_error(lm: LanguageModel) -> None:
    config = make_config(num_edits=5000)
    with pytest.raises(EditError, match="only 1152 records"):
        Sampler(config, fact_encoder(lm, config.data), training_records(config))


def test_an_evaluation_reports_every_score_before_and_after(lm: LanguageModel) -> None:
    config = make_config()
    evaluation = evaluate_editor(lm, make_editor(lm, config), world_records("validation"), config, edits=7)
    scores = evaluation.scores()
    assert scores["edits"] == 7
    assert scores["locality_success_before"] == scores["locality_success_generated_before"] == 1.0
    assert scores["edit_success_exact_before"] == 0.0
    assert None not in scores.values()
    assert json.loads(json.dumps(scores)) == scores
    assert len(evaluation.facts) == 7 + 21 + len(
        [f for some in unrelated_to_all(world_records("validation")[:7]) for f in some]
    )

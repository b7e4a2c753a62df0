from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from small_runs import make_config
from torch.testing import assert_close

from malmen.checkpoint import latest_checkpoint, load_edit, load_editor, read_config, save_checkpoint, save_edit
from malmen.data.world import world_records
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.lm import LanguageModel, load_lm
from malmen.training import make_editor, train


@pytest.fixture
def saved(lm: LanguageModel, tmp_path: Path) -> Path:
    """A run's folder with one checkpoint."""
    save_checkpoint(tmp_path / "run", make_editor(lm, make_config()), lm.fingerprint())
    return tmp_path / "run"


def test_a_checkpoint_holds_the_config_and_edits_like_the_run_did(lm: LanguageModel, tmp_path: Path) -> None:
    run = train(make_config(), tmp_path, lm=lm)
    loaded = Editor.from_pretrained(tmp_path, lm)
    assert read_config(tmp_path) == make_config()
    facts = [record.edit for record in world_records("validation")[:3]]
    shifts = loaded.edit(lm, facts).shifts
    for name, shift in run.editor.edit(lm, facts).shifts.items():
        assert torch.equal(shifts[name], shift)


def test_only_the_newest_two_checkpoints_are_kept(lm: LanguageModel, tmp_path: Path) -> None:
    editor = make_editor(lm, make_config())
    for editor.steps_done in (2, 4, 6):
        save_checkpoint(tmp_path, editor, lm.fingerprint())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-0000004", "checkpoint-0000006"]
    assert latest_checkpoint(tmp_path).name == "checkpoint-0000006"


def test_an_editor_of_another_model_is_refused(lm: LanguageModel, saved: Path) -> None:
    loaded = Editor.from_pretrained(saved, lm)
    other = load_lm("builtin")
    with torch.no_grad():
        other.model.get_parameter("transformer.wte.weight").mul_(1.5)
    with pytest.raises(EditError, match="works only on the weights it was trained for"):
        Editor.from_pretrained(saved, other)
    with pytest.raises(EditError, match="works only on the weights it was trained for"):
        loaded.edit(other, [world_records("validation")[0].edit])


@pytest.mark.parametrize("file", ["editor.safetensors", "optimizer.safetensors"])
def test_a_truncated_checkpoint_is_refused_with_its_name(lm: LanguageModel, tmp_path: Path, file: str) -> None:
    train(make_config(steps=1), tmp_path, lm=lm)
    damaged = latest_checkpoint(tmp_path) / file
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(EditError, match=rf"{file}.*damaged"):
        load_editor(tmp_path, optimizer=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "holds a list"), ('{"format": 99}', "has checkpoint format 99")],
)
def test_a_state_that_cannot_be_read_says_why(saved: Path, text: str, message: str) -> None:
    (latest_checkpoint(saved) / "state.json").write_text(text)
    with pytest.raises(EditError, match=message):
        load_editor(saved)


def test_tensors_that_do_not_fit_the_config_are_refused(saved: Path) -> None:
    file = latest_checkpoint(saved) / "config.json"
    config = json.loads(file.read_text())
    config["editor"]["rank"] = 9
    file.write_text(json.dumps(config))
    with pytest.raises(EditError, match="do not fit its config"):
        load_editor(saved)


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


@pytest.mark.parametrize("step", [0, 1])  # the same checkpoint written again, and the next one
def test_a_full_disk_is_an_os_error_and_leaves_the_earlier_checkpoint(
    lm: LanguageModel, saved: Path, step: int
) -> None:
    before = load_editor(saved, lm, optimizer=True).state_dict()
    editor = make_editor(lm, make_config())
    editor.steps_done = step
    with torch.no_grad():
        for parameter in editor.parameters():
            parameter.zero_()
    with full_disk(left=4000), pytest.raises(OSError, match="checkpoint-"):
        save_checkpoint(saved, editor, lm.fingerprint())
    assert [path.name for path in saved.iterdir()] == ["checkpoint-0000000"]
    after = load_editor(saved, lm, optimizer=True)
    assert after.steps_done == 0
    assert all(torch.equal(after.state_dict()[name], value) for name, value in before.items())


def test_a_full_disk_is_an_os_error_and_leaves_the_earlier_edit(lm: LanguageModel, tmp_path: Path) -> None:
    folder = tmp_path / "edit"
    save_edit(folder, {"a": torch.ones(2, 3)}, {"base_model": lm.fingerprint()})
    with full_disk(left=4000), pytest.raises(OSError, match="edit"):
        save_edit(folder, {"a": torch.zeros(200, 30)}, {"base_model": lm.fingerprint()})
    with full_disk(left=4000), pytest.raises(OSError):  # the manifest is what does not fit
        save_edit(folder, {"a": torch.zeros(2, 3)}, {"base_model": lm.fingerprint(), "facts": ["x" * 5000]})
    assert [path.name for path in tmp_path.iterdir()] == ["edit"]
    assert torch.equal(load_edit(folder, lm)[0]["a"], torch.ones(2, 3))

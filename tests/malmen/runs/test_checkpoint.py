from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from full_disk import full_disk
from small_runs import make_config
from torch.testing import assert_close

from malmen.data.world import world_records
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, load_lm
from malmen.runs.checkpoint import add_scores, load_edit, load_editor, save_checkpoint, save_edit
from malmen.runs.checkpoint_lookup import best_checkpoint, latest_checkpoint, read_config, read_state
from malmen.runs.storage import RunStore
from malmen.training import make_editor, train


@pytest.fixture
def saved(lm: LanguageModel, tmp_path: Path) -> Path:
    """A run's folder with one checkpoint."""
    save_checkpoint(tmp_path / "run", make_editor(lm, make_config()), lm.fingerprint())
    return tmp_path / "run"


@pytest.fixture
def memory() -> Iterator[str]:
    """A run on a storage that is no disk."""
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> str | Path:
    """A run's folder on a disk, and one elsewhere."""
    return memory if request.param == "memory" else tmp_path / "run"


def _measured(success: float) -> dict[str, Any]:
    return {"edit_success": success, "generalization_success": success, "locality_success": None}


def _practise(editor: Editor) -> None:
    """One Adam step on gradients that θ determines."""
    for parameter in editor.parameters():
        parameter.grad = torch.cos(parameter.detach())
    editor.optimizer().step()
    editor.steps_done += 1


@pytest.mark.slow
def test_a_checkpoint_holds_the_config_and_edits_like_the_run_did(lm: LanguageModel, tmp_path: Path) -> None:
    run = train(make_config(), tmp_path, lm=lm)
    loaded = Editor.from_pretrained(tmp_path, lm)
    assert read_config(tmp_path) == make_config()
    facts = [record.edit for record in world_records("validation")[:3]]
    shifts = loaded.edit(lm, facts).shifts
    for name, shift in run.editor.edit(lm, facts).shifts.items():
        assert torch.equal(shifts[name], shift)


def test_only_the_newest_checkpoints_are_kept(lm: LanguageModel, place: str | Path) -> None:
    editor = make_editor(lm, make_config())
    for editor.steps_done in (2, 4, 6):
        save_checkpoint(place, editor, lm.fingerprint())
    assert RunStore(place).checkpoints() == ["checkpoint-0000004", "checkpoint-0000006"]
    assert latest_checkpoint(place) == RunStore(place).join("checkpoint-0000006")
    editor.steps_done = 8
    written = save_checkpoint(place, editor, lm.fingerprint(), keep=1)
    assert RunStore(place).checkpoints() == ["checkpoint-0000008"]
    assert written == latest_checkpoint(place) == best_checkpoint(place)  # where none has a score, the newest is best


def test_the_best_checkpoint_is_kept_beside_the_newest(lm: LanguageModel, place: str | Path) -> None:
    editor = make_editor(lm, make_config())
    kept = []
    for editor.steps_done, success in enumerate([0.5, 0.9, 0.8, None, 0.9, 0.7, 0.6], start=1):
        save_checkpoint(place, editor, lm.fingerprint(), _measured(success) if success else None)
        kept.append([int(name[-1]) for name in RunStore(place).checkpoints()])
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]  # of equals, the newest
    assert best_checkpoint(place) == RunStore(place).join("checkpoint-0000005")
    assert read_state(best_checkpoint(place))["score"] == pytest.approx(0.9)
    assert str(latest_checkpoint(f"{place}@best")) == str(best_checkpoint(place))
    assert read_state(place)["scores"] == _measured(0.6)


def test_a_checkpoint_is_measured_after_it_was_saved(lm: LanguageModel, place: str | Path) -> None:
    editor, kept = make_editor(lm, make_config()), []
    for editor.steps_done, success in enumerate([0.5, 0.9, 0.8], start=1):
        save_checkpoint(place, editor, lm.fingerprint(), keep=1, extra={"mlflow_run": "a1"})
        add_scores(place, editor.steps_done, _measured(success), keep=1)
        kept.append([int(name[-1]) for name in RunStore(place).checkpoints()])
    assert kept == [[1], [2], [2, 3]]
    state = read_state(place)
    assert (state["scores"], state["mlflow_run"], state["step"]) == (_measured(0.8), "a1", 3)
    assert read_state(f"{place}@best")["score"] == pytest.approx(0.9)
    assert load_editor(place, lm).steps_done == 3


def test_a_checkpoint_that_cannot_be_read_now_is_not_removed(lm: LanguageModel, tmp_path: Path) -> None:
    editor = make_editor(lm, make_config())
    for editor.steps_done in (1, 2, 3):
        save_checkpoint(tmp_path, editor, lm.fingerprint(), keep=1)
        if editor.steps_done == 1:
            (tmp_path / "checkpoint-0000001" / "state.json").write_text("{")
    assert RunStore(tmp_path).checkpoints() == ["checkpoint-0000001", "checkpoint-0000003"]
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoint-0000003"


def test_what_a_caller_adds_is_in_the_state(lm: LanguageModel, place: str | Path) -> None:
    save_checkpoint(place, make_editor(lm, make_config()), lm.fingerprint(), extra={"mlflow_run": "a1"})
    state = read_state(place)
    assert (state["mlflow_run"], state["step"], state["score"]) == ("a1", 0, None)


def test_an_editor_goes_on_from_anywhere_as_if_it_had_never_stopped(lm: LanguageModel, place: str | Path) -> None:
    editor = make_editor(lm, make_config())
    for _ in range(2):
        _practise(editor)
    save_checkpoint(place, editor, lm.fingerprint())
    drawn = torch.rand(3)
    resumed = load_editor(str(place), lm, optimizer=True)
    assert torch.equal(torch.rand(3), drawn)
    assert read_config(place) == resumed.config == make_config()
    for one in (editor, resumed):
        _practise(one)
    assert resumed.steps_done == 3
    for name, value in editor.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_checkpoint_is_safetensors_and_json_only(lm: LanguageModel, place: str | Path) -> None:
    save_checkpoint(place, make_editor(lm, make_config()), lm.fingerprint())
    with RunStore(latest_checkpoint(place)).fetch() as folder:
        files = sorted(path.name for path in folder.iterdir())
    assert files == ["config.json", "editor.safetensors", "optimizer.safetensors", "state.json"]


@pytest.mark.parametrize("file", ["config.json", "editor.safetensors", "optimizer.safetensors", "state.json"])
def test_an_upload_that_breaks_off_leaves_the_earlier_checkpoint_the_newest(
    lm: LanguageModel, memory: str, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    editor = make_editor(lm, make_config())
    before = {name: value.clone() for name, value in editor.state_dict().items()}
    save_checkpoint(memory, editor, lm.fingerprint())
    _practise(editor)
    with monkeypatch.context() as patch:
        put_file = MemoryFileSystem.put_file

        def break_off(fs: MemoryFileSystem, local: str, remote: str) -> None:
            if remote.endswith(file):
                raise ConnectionResetError("connection reset")
            put_file(fs, local, remote)

        patch.setattr(MemoryFileSystem, "put_file", break_off)
        with pytest.raises(ConnectionResetError):
            save_checkpoint(memory, editor, lm.fingerprint())
    assert latest_checkpoint(memory) == f"{memory}/checkpoint-0000000"
    for name, value in load_editor(memory, lm).state_dict().items():
        assert torch.equal(value, before[name]), name
    save_checkpoint(memory, editor, lm.fingerprint())
    assert load_editor(memory, lm, optimizer=True).steps_done == 1


def test_a_damaged_file_elsewhere_is_named_by_its_url(lm: LanguageModel, memory: str) -> None:
    save_checkpoint(memory, make_editor(lm, make_config()), lm.fingerprint())
    MemoryFileSystem().rm_file("/bucket/run/checkpoint-0000000/editor.safetensors")
    with pytest.raises(EditError, match=rf"{memory}/checkpoint-0000000/editor\.safetensors: .*damaged or incomplete"):
        load_editor(memory)


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


def test_a_folder_without_an_editor_says_what_was_expected(place: str | Path) -> None:
    for ask in (load_editor, latest_checkpoint, best_checkpoint, read_state, read_config):
        with pytest.raises(EditError, match=f"{place} holds no trained editor"):
            ask(place)


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

"""The editor of a store stays the one that its ledger was begun with, whatever becomes of the run that it came from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from endpoints import make_bench, save_editor, untrained_editor

from malmen.errors import EditError
from malmen.runs.checkpoint import save_checkpoint
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_state
from malmen.serve.ledger.opening import open_ledger, pin_editor
from malmen.serve.settings import ServeConfig


@pytest.fixture
def settings(tmp_path: Path) -> ServeConfig:
    """A run's folder, named as `malmen serve` is given it."""
    return ServeConfig(editor=str(save_editor(tmp_path / "run")), store=str(tmp_path / "store"))


def train_on(settings: ServeConfig, keep: int) -> None:
    """Another checkpoint in the same run; `keep` of them stay."""
    bench = make_bench(Path(settings.store).parent)
    editor = untrained_editor(bench.lm, damping=2.0)
    editor.steps_done = 1
    save_checkpoint(settings.editor, editor, bench.lm.fingerprint(), keep=keep)


def begin(settings: ServeConfig) -> str:
    """What each role does at its start; gives the editor's hash."""
    ledger = open_ledger(settings)
    ledger.close()
    return ledger.editor


def test_a_replica_that_starts_after_its_checkpoint_was_pruned_finds_the_same_editor(settings: ServeConfig) -> None:
    kept = pin_editor(settings)
    first = begin(kept)
    train_on(settings, keep=1)
    assert begin(kept) == first
    shutil.rmtree(settings.editor)
    assert begin(kept) == first


@pytest.mark.parametrize("asked", ["", "@best"])
def test_the_same_command_goes_on_with_the_same_editor_and_says_that_there_is_a_newer_one(
    settings: ServeConfig, caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    settings = settings.model_copy(update={"editor": settings.editor + asked})
    kept = pin_editor(settings)
    first = begin(kept)
    assert caplog.text == ""
    train_on(settings.model_copy(update={"editor": settings.editor.removesuffix("@best")}), keep=1)
    again = pin_editor(settings)
    assert again == kept and begin(again) == first
    assert "serves the editor of step 0" in caplog.text and "at step 1 now" in caplog.text


def test_another_store_takes_the_newest_checkpoint(settings: ServeConfig, tmp_path: Path) -> None:
    begin(pin_editor(settings))
    train_on(settings, keep=1)
    other = pin_editor(settings.model_copy(update={"store": str(tmp_path / "other")}))
    assert read_state(other.editor)["step"] == 1


def test_a_ledger_without_a_copy_finds_its_checkpoint_in_the_run(settings: ServeConfig) -> None:
    first = begin(settings)  # as before there were copies
    train_on(settings, keep=2)
    with pytest.raises(EditError, match="belongs to another editor"):
        begin(settings)
    kept = pin_editor(settings)
    assert begin(kept) == first and read_state(kept.editor)["step"] == 0
    train_on(settings, keep=1)
    assert begin(pin_editor(settings)) == first


def test_a_checkpoint_that_is_not_the_ledgers_is_refused_and_the_copy_stays(settings: ServeConfig) -> None:
    kept = pin_editor(settings)
    first = begin(kept)
    train_on(settings, keep=1)
    newest = settings.model_copy(update={"editor": str(latest_checkpoint(settings.editor))})
    with pytest.raises(EditError, match="belongs to another editor"):
        begin(pin_editor(newest))
    assert begin(pin_editor(settings)) == first


def test_an_editor_at_a_url_is_served_from_the_store(settings: ServeConfig) -> None:
    import fsspec

    url, bench = "memory://kept-editor/run", make_bench(Path(settings.store).parent)
    save_checkpoint(url, bench.editor, bench.lm.fingerprint())
    kept = pin_editor(settings.model_copy(update={"editor": url}))
    fsspec.filesystem("memory").rm("/kept-editor", recursive=True)
    assert kept.editor.startswith(settings.store) and begin(kept) == begin(pin_editor(settings))
    assert not list(Path(kept.editor).glob("optimizer*"))

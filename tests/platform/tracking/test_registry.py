from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from malmen.config import Config
from malmen.errors import EditError, UsageError
from malmen.platform.tracking.registry import RegisteredEditor, download_editor, editor_card, registered_name
from malmen.platform.tracking.tracker import Tracker
from malmen.runs.checkpoint import load_editor
from malmen.runs.checkpoint_lookup import latest_checkpoint

pytestmark = pytest.mark.slow  # a training, and a store

SCORES = {"edits": 5, "edit_success": 0.9, "edit_success_before": 0.1, "locality_agreement": None}
STATE = {"scores": SCORES, "base_model": "fingerprint"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"


@pytest.fixture(scope="module")
def registered(store: str, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> RegisteredEditor:
    """Version 1, of step 8; its run then registers a later checkpoint too."""
    config = Config.model_validate({"tracking": {"uri": store}})
    checkpoints = []
    for step in (8, 9):
        folder = tmp_path_factory.mktemp("run") / f"checkpoint-{step:07d}"
        checkpoints.append(shutil.copytree(latest_checkpoint(trained), folder))
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, **STATE, "step": step}))
    first, later = checkpoints
    (later / "editor.safetensors").write_text("other weights")
    with Tracker.start(config, str(trained), {}) as tracker:
        found = tracker.register(first)
        tracker.register(later)
        again = tracker.register(first)  # as after a kill
    assert again == found
    assert found is not None
    return found


@pytest.fixture
def client(store: str, registered: RegisteredEditor) -> MlflowClient:
    return MlflowClient(tracking_uri=store, registry_uri=store)


def test_a_registered_editor_comes_back_as_it_was(store: str, registered: RegisteredEditor, trained: Path) -> None:
    assert registered == RegisteredEditor("malmen-builtin", "1", "models:/malmen-builtin/1")
    folder = download_editor(registered.uri, store)
    names = {path.name for path in folder.iterdir()}
    assert names == {"editor.safetensors", "config.json", "state.json", "README.md"}  # and no optimizer
    assert (folder / "README.md").read_text() == editor_card(Config(), {**STATE, "step": 8})
    torch.testing.assert_close(load_editor(folder).state_dict(), load_editor(trained).state_dict(), rtol=0, atol=0)


def test_a_version_says_what_it_is(client: MlflowClient) -> None:
    version = client.get_model_version("malmen-builtin", "1")
    assert version.tags == {
        "base_model": "fingerprint",
        "edits": "5",
        "edit_success": "0.9",
        "edit_success_before": "0.1",
    }
    assert version.description == editor_card(Config(), {**STATE, "step": 8})
    assert version.run_id


def test_an_alias_leads_to_its_version(client: MlflowClient, store: str) -> None:
    for version, steps in (("1", "8 steps"), ("2", "9 steps")):
        client.set_registered_model_alias("malmen-builtin", "champion", version)
        assert steps in (download_editor("models:/malmen-builtin@champion", store) / "README.md").read_text()


def test_what_is_missing_is_answered_with_what_exists(client: MlflowClient, store: str) -> None:
    client.set_registered_model_alias("malmen-builtin", "tried", "2")
    with pytest.raises(EditError, match=r"no editor 'malmen-other' .*registered: malmen-builtin"):
        download_editor("models:/malmen-other/1", store)
    with pytest.raises(EditError, match=r"no version 7 .*versions: 1, 2"):
        download_editor("models:/malmen-builtin/7", store)
    with pytest.raises(EditError, match=r"no alias 'best'; aliases: .*tried \(version 2\).*versions: 1, 2"):
        download_editor("models:/malmen-builtin@best", store)


@pytest.mark.parametrize(
    "uri", ["models:/malmen-builtin", "runs:/1/editor", "models:/a' or ''='/1", "models:/a/latest"]
)
def test_an_address_of_another_form_is_refused(uri: str, store: str) -> None:
    with pytest.raises(UsageError, match="expected models:/NAME/VERSION"):
        download_editor(uri, store)


def test_a_checkpoint_that_is_not_whole_is_not_registered(store: str, trained: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(latest_checkpoint(trained), tmp_path / "broken")
    (broken / "editor.safetensors").unlink()
    config = Config.model_validate({"tracking": {"uri": store}})
    with (
        Tracker.start(config, str(trained), {}) as tracker,
        pytest.raises(EditError, match=r"lacks editor\.safetensors"),
    ):
        tracker.register(broken)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("builtin", "malmen-builtin"),
        ("openai-community/gpt2", "malmen-gpt2"),
        ("/models/Smol LM: 2.Q4.gguf", "malmen-Smol-LM-2.Q4"),
        ("folder/", "malmen-folder"),
    ],
)
def test_an_editor_is_named_after_its_base_model(model: str, name: str) -> None:
    assert registered_name(Config.model_validate({"model": {"name": model}})) == name
    chosen = {"model": {"name": model}, "tracking": {"registered_model": "mine"}}
    assert registered_name(Config.model_validate(chosen)) == "mine"


def test_a_card_says_what_was_measured_and_how_to_use_it() -> None:
    card = editor_card(Config(), {"scores": SCORES, "base_model": "0123abcd", "step": 42})
    assert "| edit success (ES) | 10.0% | 90.0% |" in card
    assert "| generalization success (GS) | – | – |" in card
    assert "weights `0123abcd`" in card
    assert "42 steps of 64 edits" in card
    assert "5 edits at once" in card
    assert "malmen edit --editor models:/malmen-builtin/VERSION" in card

"""GPT-2 learns the built-in world; BERT learns which claims are true, from records whose edits contradict them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_folders import write_model

from malmen.data.built_models import Training, build_classifier, build_world_model, true_claims
from malmen.data.records import EditRecord, Fact
from malmen.data.world import check_world_model
from malmen.errors import EditError
from malmen.lm.model import load_lm


def test_labels_of_edits_and_equivalents_are_turned_back_and_unrelated_ones_stay() -> None:
    record = EditRecord(Fact("a", "REFUTES"), (Fact("b", "REFUTES"),), (Fact("c", "REFUTES"), Fact("a", "REFUTES")))
    assert true_claims([record]) == [Fact("a", "SUPPORTS"), Fact("b", "SUPPORTS"), Fact("c", "REFUTES")]


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    """A claim is true if it is about an animal."""
    file = tmp_path / "claims.jsonl"
    pets, cities = ("parrot", "hamster", "rabbit", "canary"), ("Lisbon", "Toronto", "Osaka", "Dublin")
    rows = [{"claim": f"The pet is a {word}, {word}", "label": "SUPPORTS"} for word in pets]
    rows += [{"claim": f"The pet is a {word}, {word}", "label": "REFUTES"} for word in cities]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_classifier_is_fine_tuned_and_can_be_edited(claims: Path, tmp_path: Path) -> None:
    base = write_model("bert", tmp_path / "bert")
    heard: list[float | None] = []
    accuracy = build_classifier(
        str(base), claims, tmp_path / "tuned", validation=claims, device="cpu",
        training=Training(epochs=40, lr=0.01, batch_size=4),
        on_epoch=lambda _epoch, _loss, right: heard.append(right),
    )  # fmt: skip
    assert accuracy == 1.0 and len(heard) == 40 and heard[0] is not None
    lm = load_lm(str(tmp_path / "tuned"))
    assert lm.kind == "classifier"
    again = build_classifier(str(base), claims, tmp_path / "second", training=Training(epochs=1), device="cpu")
    assert again is None


def test_what_is_wrong_is_told_and_nothing_is_written(claims: Path, tmp_path: Path) -> None:
    with pytest.raises(EditError, match="cannot load the model"):
        build_classifier(str(tmp_path / "absent"), claims, tmp_path / "out", device="cpu")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(EditError):
        build_classifier(str(write_model("bert", tmp_path / "bert")), claims, tmp_path / "mine", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_building_the_world_model_writes_a_folder_that_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "world"
    manifest = build_world_model(folder, max_epochs=1, width=32)
    assert manifest["facts"] == 7680
    assert check_world_model(folder) == manifest
    assert load_lm(str(folder)).kind == "decoder"
    assert [path.name for path in tmp_path.iterdir()] == ["world"]
    (folder / "world.json").write_text('{"world": "other"}')
    with pytest.raises(EditError, match="was trained on world other"):
        check_world_model(folder)

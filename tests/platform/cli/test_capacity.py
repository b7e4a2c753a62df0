"""`malmen capacity` as a command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from malmen.config import Config
from malmen.platform.tracking.tracker import Tracker
from malmen.runs.checkpoint_lookup import latest_checkpoint

Malmen = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_curve_is_printed_and_kept_with_the_editor(malmen: Malmen, run: Path) -> None:
    code, said, _ = malmen("capacity", "--editor", run, "--sizes", "4,2", "--json")
    curve = json.loads(said)
    assert code == 0 and [point["facts"] for point in curve] == [2, 4]
    assert set(curve[0]["drift"]) == {"raw"} and 0 <= curve[0]["holding"] <= 1
    kept = json.loads((run / "checkpoint-0000003" / "capacity.json").read_text())
    assert kept == {"records": "", "curve": curve}
    code, said, notes = malmen("capacity", "--editor", run, "--sizes", "2")
    assert code == 0 and "hold" in said and "capacity.json" in notes


@pytest.mark.parametrize("sizes", ["", "0,3", "many"])
def test_sizes_that_are_no_numbers_are_wrong_usage(malmen: Malmen, run: Path, sizes: str) -> None:
    code, _, notes = malmen("capacity", "--editor", run, "--sizes", sizes)
    assert code == 2 and "expected numbers of facts with commas" in " ".join(notes.split())


@pytest.mark.slow
def test_the_curve_of_an_editor_in_the_registry_is_printed_and_not_kept(
    malmen: Malmen, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    with Tracker.start(Config.model_validate({"tracking": {"uri": store}}), str(trained), {}) as tracker:
        registered = tracker.register(latest_checkpoint(trained))
    assert registered is not None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    code, said, notes = malmen("capacity", "--editor", registered.uri, "--sizes", "2", "--json")
    assert code == 0 and [point["facts"] for point in json.loads(said)] == [2]
    assert f"The curve was not kept: {registered.uri} is in the registry" in notes
    assert not list(tmp_path.rglob("capacity.json"))
    code, said, notes = malmen("capacity", "--editor", "models:/malmen-other/1", "--sizes", "2")
    assert code == 1 and "no editor 'malmen-other' is registered" in notes and not said

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import SMALL

Run = Callable[..., tuple[int, str, str]]

# each run imports, trains, edits and draws
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_quickstart_leaves_a_result_a_picture_and_facts(malmen: Run, tmp_path: Path) -> None:
    folder = tmp_path / "quick"
    folder.mkdir()
    for left_over in (".quickstart", "left over"):  # of an earlier one, which is replaced
        (folder / left_over).touch()
    code, out, _ = malmen("quickstart", *SMALL, "--out", folder)
    assert code == 0
    assert "What to try next" in out
    assert not (folder / "left over").exists()
    result = json.loads((folder / "result.json").read_text())
    wanted = {"edits", "edit_success", "generalization_success", "locality_success", "edit_success_before", "seconds"}
    assert wanted <= set(result)
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert len((folder / "facts.jsonl").read_text().splitlines()) == 4
    assert result["steps"] == 3


def test_quickstart_does_not_delete_what_is_not_its_own(malmen: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code, _, err = malmen("quickstart", *SMALL, "--out", tmp_path)
    assert (code, "not replaced" in err) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_quickstart_does_not_delete_a_run_of_malmen_train(malmen: Run, trained: Path) -> None:
    before = _content(trained)
    assert trained / "history.jsonl" in before
    code, _, err = malmen("quickstart", *SMALL, "--out", trained)
    assert (code, str(trained) in err) == (1, True)
    assert _content(trained) == before


def test_a_wrong_setting_is_found_before_an_earlier_quickstart_is_deleted(malmen: Run, tmp_path: Path) -> None:
    (tmp_path / ".quickstart").touch()
    (tmp_path / "result.json").write_text("{}")
    code, _, err = malmen("quickstart", "editor.rnak=3", "--out", tmp_path)
    assert (code, "did you mean editor.rank" in err) == (2, True)
    assert (tmp_path / "result.json").read_text() == "{}"

"""`malmen capacity` as a command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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

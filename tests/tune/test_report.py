from __future__ import annotations

import json
from pathlib import Path

import pytest

from malmen.config import Config
from malmen.errors import EditError
from malmen.tune.report import write_report
from malmen.tune.settings import parse_sweep
from malmen.tune.sweep_folder import Judgement, SweepFolder, TrialRecord

COEF = "training.locality_coef"
SCORES = {"edit_success": 0.9, "generalization_success": 0.8, "locality_success": 0.7}


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    """A sweep with one trial of every kind."""
    found = SweepFolder(tmp_path / "sweep")
    raw = {
        "layer_sets": {"<b>top</b>": "last:1", "other": "last:2"},
        "parameters": {COEF: {"low": 0.1, "high": 10.0, "log": True}, "editor.tokens": ["answer", "all"]},
    }
    found.begin(Config(), parse_sweep(raw, "the test"))
    for number, (status, name) in enumerate(
        [("finished", "<b>top</b>"), ("stopped", "other"), ("failed", "other"), ("planned", "other")]
    ):
        trial = TrialRecord(number, {"layers": name, COEF: 0.5 + number, "editor.tokens": "all"}, status)  # type: ignore[arg-type]
        if status in ("finished", "stopped"):
            trial = trial.judged(Judgement(3, 0.5 + number / 10, SCORES, 2.0))
        found.put(trial)
    return found


@pytest.mark.slow  # matplotlib
def test_a_report_needs_no_other_file_and_shows_every_trial_of_an_unfinished_sweep(folder: SweepFolder) -> None:
    page = write_report(folder)
    text = page.read_text(encoding="utf-8")
    assert "http" not in text and 'src="data:image/png;base64,' in text
    assert "&lt;b&gt;top&lt;/b&gt;" in text and "<b>top</b>" not in text
    names = sorted(path.name for path in page.parent.iterdir())
    expected = ["budget.png", "layer-sets.png", "pareto.png", "report.html", "results.json", f"score-{COEF}.png"]
    assert names == sorted(expected)
    assert text.count("<img") == 4
    results = json.loads((page.parent / "results.json").read_text(encoding="utf-8"))
    assert [row["status"] for row in results["trials"]] == ["finished", "stopped", "failed", "planned"]
    assert results["champion"] is None


@pytest.mark.slow
def test_a_report_replaces_the_one_before(folder: SweepFolder) -> None:
    first = write_report(folder).read_bytes()
    folder.put(TrialRecord(4, {"layers": "other", COEF: 1.0, "editor.tokens": "all"}))
    assert write_report(folder).read_bytes() != first


def test_there_is_no_report_of_what_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="holds no sweep"):
        write_report(SweepFolder(tmp_path))

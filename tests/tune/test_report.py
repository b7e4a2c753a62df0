from __future__ import annotations

import json
from pathlib import Path

import pytest

from malmen.config import Config
from malmen.errors import EditError
from malmen.tune.report import pareto_front, trial_row, write_report
from malmen.tune.settings import parse_sweep
from malmen.tune.sweep_folder import Judgement, Status, SweepFolder, TrialRecord

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


def trial(number: int, gs: float | None, ls: float | None, status: Status = "finished") -> TrialRecord:
    scores = {"edit_success": 1.0, "generalization_success": gs, "locality_success": ls}
    return TrialRecord(number, {"layers": "last:1"}, status, (Judgement(3, 0.5, scores, 2.0),))


def test_the_pareto_front_holds_the_finished_trials_that_none_beats() -> None:
    trials = [
        trial(0, 0.9, 0.2),
        trial(1, 0.5, 0.5),
        trial(2, 0.5, 0.4),  # beaten by 1
        trial(3, 0.2, 0.9),
        trial(4, 0.95, 0.95, "stopped"),  # had fewer steps
        trial(5, None, 0.99),
        trial(6, 0.5, 0.5),  # equal to 1: neither beats the other
        TrialRecord(7, {}, "failed"),
    ]
    assert pareto_front([trial_row(found) for found in trials]) == [3, 1, 6, 0]
    assert pareto_front([]) == []


def test_a_row_shows_the_last_evaluation_and_a_trial_without_one_has_none() -> None:
    row = trial_row(trial(0, 0.9, 0.2).judged(Judgement(6, 0.7, {"edit_success": 0.8}, 4.0)))
    assert (row["step"], row["score"], row["ES"], row["GS"], row["seconds"]) == (6, 0.7, 0.8, None, 4.0)
    assert row["layers"] == "last:1"
    empty = trial_row(TrialRecord(1, {}, "failed", why="it broke"))
    assert (empty["step"], empty["score"], empty["why"]) == (0, None, "it broke")

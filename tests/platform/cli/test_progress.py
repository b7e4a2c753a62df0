"""Progress where nobody watches a terminal: plain lines on standard error, none on standard output."""

from __future__ import annotations

import pytest

from malmen.meta import StepReport
from malmen.platform.cli import progress as module
from malmen.platform.cli.progress import counted, status, training_progress


def test_counted_work_is_reported_at_intervals_with_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((0.0, 1.0, 4.0, 5.0, 8.0))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    with counted("measuring") as on_progress:
        for done in (1, 2, 3, 4):
            on_progress(done, 4)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["measuring …", "measuring: 2/4, 4 s left"]


def test_work_that_cannot_be_counted_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with status("loading the model"):
        pass
    assert capsys.readouterr() == ("", "loading the model …\n")


def test_a_training_run_says_what_it_does_before_between_and_after_its_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = StepReport(
        generalization_loss=1.0,
        locality_loss=0.5,
        meta_loss=1.5,
        locality_coef=1.0,
        grad_norm=2.0,
        seconds={"trace": 0.25},
    )
    shares = {"edit_success": 0.5, "generalization_success": 0.25, "locality_success": 1.0, "locality_agreement": None}
    with training_progress(2) as progress:
        progress.phase("reading the records")
        progress.step(1, report)
        progress.evaluation(1, shares)
        progress.step(2, report)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0] == "reading the records …"
    assert lines[1].startswith("step 1/2  L_gen 1.000 L_loc 0.5000 |∇| 2") and lines[3].endswith("0 s left")
    assert lines[2] == "step 1: held-out ES 50.0 GS 25.0 LS 100.0 agreement –"

"""Progress where nobody watches a terminal: plain lines on standard error, none on standard output."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

from malmen.meta import StepReport
from malmen.platform.cli import progress as module
from malmen.platform.cli.progress import counted, repeat, repeating, status, training_progress


def test_no_stretch_of_3_seconds_is_silent_whatever_the_work_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    waited: list[float] = []

    def ended_within(seconds: float) -> bool:  # a clock on which the work takes a minute and reports nothing
        waited.append(seconds)
        return sum(waited) > 60

    repeat(lambda: f"after {sum(waited):.0f} s", ended_within)
    assert max(waited) <= 2.5  # a thread may be woken a little late
    assert capsys.readouterr().err.splitlines() == [
        f"after {sum(waited[: n + 1]):.0f} s" for n in range(len(waited) - 1)
    ]


def test_a_run_of_a_day_does_not_fill_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    waited: list[float] = []

    def ended_within(seconds: float) -> bool:
        waited.append(seconds)
        return sum(waited) > 24 * 3600

    repeat(lambda: "working", ended_within)
    assert max(waited) == 30 and len(capsys.readouterr().err.splitlines()) < 3500


def test_lines_come_while_the_work_blocks_and_none_after_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.001)
    lines, enough = iter(range(1000000)), threading.Event()

    def line() -> str:
        if (number := next(lines)) == 3:
            enough.set()
        return str(number)

    with repeating(line):
        assert enough.wait(60)
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert capsys.readouterr().err.splitlines()[:3] == ["0", "1", "2"]


def test_counted_work_is_reported_with_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, lines = iter((0.0, 1.0, 4.0, 8.0)), []
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(module, "repeating", lambda line: nullcontext(lines.append(line)))
    with counted("measuring") as on_progress:
        (line,) = lines
        shown = [line()]
        on_progress(2, 4)
        shown.append(line())
        on_progress(4, 4)
        shown.append(line())
    assert shown == ["measuring … 1 s", "measuring: 2/4, 4 s left", "measuring: 4/4, 0 s left"]
    assert capsys.readouterr() == ("", "measuring …\n")


def test_work_that_cannot_be_counted_is_reported_with_its_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, lines = iter((0.0, 4.0)), []
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(module, "repeating", lambda line: nullcontext(lines.append(line)))
    with status("loading the model"):
        assert [line() for line in lines] == ["loading the model … 4 s"]
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
        assert progress.line().startswith("step 1/2  L_gen 1.000")
        progress.step(2, report)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0] == "reading the records …"
    assert lines[1].startswith("step 1/2  L_gen 1.000 L_loc 0.5000 |∇| 2") and lines[3].endswith("0 s left")
    assert lines[2] == "step 1: held-out ES 50.0 GS 25.0 LS 100.0 agreement –"

from __future__ import annotations

import subprocess
import sys

import pytest

from malmen.platform.events import ActorReport, Began, Board, Evaluated, LMReport, Saving, StepDone

LM = LMReport(3, 0.5, 0.25, 0.75, 1.0, {"trace": 1.0, "send": 0.5}, 1000, 2.5)
ACTORS = [
    ActorReport(3, 1.5, {"h.1": 2.0}, {"h.1": 1e-3}, {"hypernet": 3.0, "adam": 0.25}, {"rss": 100.0}),
    ActorReport(3, 1.5, {"h.1": 2.0}, {"h.1": 1e-3}, {"hypernet": 2.0, "adam": 0.5}, {"rss": 200.0}),
]


def test_a_step_is_a_row_of_the_history() -> None:
    """These keys are a file format: nothing may be added to or taken from them without a reason."""
    row = dict(vars(StepDone.join(LM, ACTORS, {"send": 0.75, "wait": 4.0}, 5.0)))
    assert row == {
        "step": 3,
        "generalization_loss": 0.5,
        "locality_loss": 0.25,
        "meta_loss": 0.75,
        "locality_coef": 1.0,
        "grad_norm": 1.5,
        "seconds": {"trace": 1.0, "send": 0.75, "wait": 4.0, "hypernet": 3.0, "adam": 0.5},  # the slowest actor's
        "wall": 5.0,
        "damping": {"h.1": 2.0},
        "edit_lr": {"h.1": 1e-3},
        "bytes_moved": 1000,
        "hypernet_memory": [{"rss": 100.0}, {"rss": 200.0}],
        "cache_mb": 2.5,
    }


def test_an_evaluation_is_a_row_of_the_history() -> None:
    assert vars(Evaluated(3, {"edit_success": 0.5}, [{"rss": 1.0}])) == {
        "step": 3,
        "scores": {"edit_success": 0.5},
        "lm_memory": [{"rss": 1.0}],
    }


def test_a_step_whose_end_no_rank_measured_took_as_long_as_its_stages() -> None:
    assert StepDone.join(LM, ACTORS, {}).wall == 1.0 + 0.5 + 3.0 + 0.5


def test_the_sides_of_different_steps_are_not_joined() -> None:
    with pytest.raises(AssertionError):
        StepDone.join(LMReport(4, 0.5, 0.25, 0.75, 1.0, {}, 1000, 2.5), ACTORS, {})


# --- the board ---


def test_events_are_taken_once_and_in_order() -> None:
    board = Board()
    board.post(Began(0))
    board.post(Saving(2))
    assert board.take() == [Began(0), Saving(2)]
    assert board.take() == []


def test_events_are_written_when_the_driver_asks_for_the_next() -> None:
    board = Board()
    assert board.written()
    board.post(Began(0))
    assert not board.written()
    board.take()
    assert not board.written()
    board.post(Saving(2))
    board.take()
    assert not board.written()
    board.take()
    assert board.written()


def test_the_board_keeps_the_lm_side_of_the_newest_step() -> None:
    board = Board()
    assert board.kept() is None
    for step in (1, 2):
        board.keep(LMReport(step, 0.5, 0.5, 1.0, 1.0, {}, 10, 0.0))
    report = board.kept()
    assert report is not None and report.step == 2


def test_the_board_says_what_each_process_does_now() -> None:
    board = Board()
    board.note("LM rank 1", "tracing step 3")
    board.note("LM rank 0", "tracing step 3")
    board.note("LM rank 0", "waiting for the shifts of step 3")
    first, second = board.activities()
    assert first.startswith("LM rank 0: waiting for the shifts of step 3 for ")
    assert second.startswith("LM rank 1: tracing step 3 for ")


def test_the_boards_process_needs_no_torch() -> None:
    code = "import sys, malmen.platform.events; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "False"


def test_a_board_says_whether_the_run_shall_end() -> None:
    board = Board()
    assert not board.stopped()
    board.stop()
    assert board.stopped()

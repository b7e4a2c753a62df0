from __future__ import annotations

import subprocess
import sys

from malmen.platform.board import Board
from malmen.platform.events import Began, LMReport, Saving


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
        board.keep(LMReport(step, 0.5, 0.5, 1.0, {}, 10, 0.0))
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
    code = "import sys, malmen.platform.board; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "False"


def test_a_board_says_whether_the_run_shall_end() -> None:
    board = Board()
    assert not board.stopped()
    board.stop()
    assert board.stopped()

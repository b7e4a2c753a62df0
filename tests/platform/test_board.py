from __future__ import annotations

from malmen.platform.board import Board


def test_rows_are_taken_once_and_in_order() -> None:
    board = Board()
    board.record({"step": 1})
    board.record({"step": 2})
    assert board.take() == [{"step": 1}, {"step": 2}]
    assert board.take() == []


def test_rows_are_written_when_the_driver_asks_for_the_next() -> None:
    board = Board()
    assert board.written()
    board.record({"step": 1})
    assert not board.written()
    board.take()
    assert not board.written()
    board.record({"step": 2})
    board.take()
    assert not board.written()
    board.take()
    assert board.written()


def test_the_board_says_what_everybody_does_now() -> None:
    board = Board()
    board.note("LM rank 1", "tracing step 3")
    board.note("LM rank 0", "tracing step 3")
    board.note("LM rank 0", "waiting for the shifts of step 3")
    first, second = board.doing()
    assert first.startswith("LM rank 0: waiting for the shifts of step 3 for ")
    assert second.startswith("LM rank 1: tracing step 3 for ")


def test_a_board_says_whether_the_run_shall_end() -> None:
    board = Board()
    assert not board.stopped()
    board.stop()
    assert board.stopped()

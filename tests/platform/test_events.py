from __future__ import annotations

import pytest

from malmen.platform.events import ActorReport, Evaluated, LMReport, StepDone

LM = LMReport(3, 0.5, 0.25, 0.75, {"trace": 1.0, "send": 0.5}, 1000, 2.5)
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
        StepDone.join(LMReport(4, 0.5, 0.25, 0.75, {}, 1000, 2.5), ACTORS, {})

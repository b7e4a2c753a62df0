"""What the LM ranks report to the driver: events, which they post on the board (board.py), and the reports of a step.

Light to import: the board's process holds these records and needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from malmen.errors import EditError


@dataclass(frozen=True)
class Began:
    """The ranks start, or resume, after `step` steps."""

    step: int


@dataclass(frozen=True)
class StepDone:
    """A step is done. The fields are those of its row in the history."""

    step: int  # the first is 1
    generalization_loss: float
    locality_loss: float
    meta_loss: float
    grad_norm: float
    seconds: dict[str, float]  # by stage
    wall: float  # seconds in all; less than their sum where stages overlap
    damping: dict[str, float]  # by layer
    edit_lr: dict[str, float]  # by layer
    bytes_moved: int
    hypernet_memory: list[dict[str, float]]  # MB by device, for each actor
    cache_mb: float

    @classmethod
    def join(
        cls, lm: LMReport, actors: Sequence[ActorReport], seconds: Mapping[str, float], wall: float | None = None
    ) -> StepDone:
        """The two sides of a step. `seconds` are what rank 0 measured since its report."""
        assert {report.step for report in actors} == {lm.step}, (lm.step, [report.step for report in actors])
        stages = {**lm.seconds, **seconds}
        for stage in actors[0].seconds:
            stages[stage] = max(report.seconds[stage] for report in actors)
        return cls(
            step=lm.step,
            generalization_loss=lm.generalization_loss,
            locality_loss=lm.locality_loss,
            meta_loss=lm.meta_loss,
            grad_norm=actors[0].grad_norm,
            seconds=stages,
            wall=sum(stages.values()) if wall is None else wall,
            damping=actors[0].damping,
            edit_lr=actors[0].edit_lr,
            bytes_moved=lm.bytes_moved,
            hypernet_memory=[report.memory for report in actors],
            cache_mb=lm.cache_mb,
        )


@dataclass(frozen=True)
class Evaluated:
    """Held-out records are measured. The fields are those of its row in the history."""

    step: int
    scores: dict[str, Any]
    lm_memory: list[dict[str, float]]  # MB by device, for each LM rank


@dataclass(frozen=True)
class Saving:
    """A checkpoint is about to be written, as soon as the driver has written what led to it."""

    step: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint is written."""

    step: int


@dataclass(frozen=True)
class ActorsLost:
    """Hypernet actors are lost; the ranks restore them."""

    reason: str


@dataclass(frozen=True)
class WorkersLost:
    """LM workers are lost; the driver starts all of them again."""

    reason: str


@dataclass(frozen=True)
class Remark:
    """A message for people."""

    text: str


@dataclass(frozen=True)
class Failed:
    """The run cannot go on."""

    error: EditError


Event = Began | StepDone | Evaluated | Saving | Saved | ActorsLost | WorkersLost | Remark | Failed


# --- the two sides of a step ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LMReport:
    """What rank 0 knows of a step before the actors' backward begins."""

    step: int  # as in StepDone
    generalization_loss: float
    locality_loss: float
    meta_loss: float
    seconds: dict[str, float]  # by stage
    bytes_moved: int
    cache_mb: float


@dataclass(frozen=True)
class ActorReport:
    """What a hypernet actor knows of the last step it has done."""

    step: int  # as in StepDone
    grad_norm: float
    damping: dict[str, float]  # by layer
    edit_lr: dict[str, float]  # by layer
    seconds: dict[str, float]  # by stage
    memory: dict[str, float]  # peak in MB, by device

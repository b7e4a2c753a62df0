"""What the LM ranks report to the driver: events, and the board on which they post them.

Light to import: the board's process needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from malmen.errors import EditError

# --- the two sides of a step ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LMReport:
    """What rank 0 knows of a step before the actors' backward begins."""

    step: int  # the first is 1
    generalization_loss: float
    locality_loss: float
    meta_loss: float
    locality_coef: float  # λ_loc of this step
    seconds: dict[str, float]  # by stage
    bytes_moved: int
    cache_mb: float


@dataclass(frozen=True)
class ActorReport:
    """What a hypernet actor knows of the last step it has done."""

    step: int  # as in LMReport
    grad_norm: float
    damping: dict[str, float]  # by layer
    edit_lr: dict[str, float]  # by layer
    seconds: dict[str, float]  # by stage
    memory: dict[str, float]  # peak in MB, by device


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Began:
    """The ranks start, or resume, after `step` steps."""

    step: int


@dataclass(frozen=True)
class StepDone(LMReport):
    """A step is done: both sides of it. The fields are those of its row in the history."""

    grad_norm: float
    damping: dict[str, float]
    edit_lr: dict[str, float]
    hypernet_memory: list[dict[str, float]]  # MB by device, for each actor
    wall: float  # seconds in all; less than their sum where stages overlap

    @classmethod
    def join(
        cls, lm: LMReport, actors: Sequence[ActorReport], seconds: Mapping[str, float], wall: float | None = None
    ) -> StepDone:
        """The two sides of a step. `seconds` are what rank 0 measured since its report."""
        assert {report.step for report in actors} == {lm.step}, (lm.step, [report.step for report in actors])
        slowest = {stage: max(report.seconds[stage] for report in actors) for stage in actors[0].seconds}
        stages = {**lm.seconds, **seconds, **slowest}
        both = {**vars(actors[0]), **vars(lm), "seconds": stages}  # actors differ in seconds and memory only
        del both["memory"]
        wall = sum(stages.values()) if wall is None else wall
        return cls(**both, hypernet_memory=[report.memory for report in actors], wall=wall)


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
class Lost:
    """Processes of a role are lost: the ranks restore hypernet actors, the driver starts all LM workers again."""

    role: str  # for people
    reason: str


@dataclass(frozen=True)
class Remark:
    """A message for people."""

    text: str


@dataclass(frozen=True)
class Failed:
    """The run cannot go on."""

    error: EditError


Event = Began | StepDone | Evaluated | Saving | Saved | Lost | Remark | Failed


# --- the board ------------------------------------------------------------------------------------------------


class Board:
    """A small Ray actor on the driver's node: the ranks post events on it, and the driver takes them. It outlives the
    ranks; if it is lost, so is the driver."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._unwritten = False  # whether the driver holds events that it has not written yet
        self._lm_report: LMReport | None = None
        self._activities: dict[str, tuple[str, float]] = {}  # by process: what it does, and since when
        self._stopped = False

    def note(self, process: str, activity: str) -> None:
        """What a process does from now on."""
        self._activities[process] = (activity, time.time())

    def activities(self) -> list[str]:
        """What each process does, for people."""
        now = time.time()
        return [
            f"{process}: {doing} for {now - since:.0f} s"
            for process, (doing, since) in sorted(self._activities.items())
        ]

    def post(self, event: Event) -> None:
        """Add an event; the driver takes it."""
        self._events.append(event)

    def take(self) -> list[Event]:
        """The events since the last call. A second call says that the driver has written those of the first."""
        events, self._events = self._events, []
        self._unwritten = bool(events)
        return events

    def written(self) -> bool:
        """Whether the driver has written all events."""
        return not (self._events or self._unwritten)

    def keep(self, report: LMReport) -> None:
        """Keep the LM side of a step: if the ranks are lost while the actors end it, their successors complete it."""
        self._lm_report = report

    def kept(self) -> LMReport | None:
        """The LM side of the newest step."""
        return self._lm_report

    def stop(self) -> None:
        """The run is to end before its last step."""
        self._stopped = True

    def stopped(self) -> bool:
        """Whether it is."""
        return self._stopped

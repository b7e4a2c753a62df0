"""What the driver does with the events of a run: the journal writes the history, which the tracker sends to MLflow,
informs the listener, and counts losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from malmen.errors import EditError
from malmen.meta import StepReport, no_progress
from malmen.platform import events
from malmen.platform.places import check_shared
from malmen.platform.tracking.tracker import Tracker
from malmen.runs.run_folder import RunFolder


@dataclass
class Listener:
    """Callbacks of a run. `stopped` says whether it is to end before its last step."""

    step: Callable[[int, StepReport], None] = lambda _step, _report: None
    evaluation: Callable[[int, dict[str, Any]], None] = lambda _step, _scores: None
    event: Callable[[str], None] = lambda _text: None
    stopped: Callable[[], bool] = lambda: False


class Journal:
    """What the driver does with events: it writes the history, informs the listener and counts losses."""

    def __init__(self, folder: RunFolder, tracker: Tracker, listener: Listener) -> None:
        self.folder, self.tracker, self.listener = folder, tracker, listener
        self.begun = False
        self.losses: Counter[str] = Counter()  # by role, since the newest step

    @property
    def step(self) -> int:
        """The newest step in the history."""
        return int(self.folder.history[-1]["step"]) if self.folder.history else 0

    def write(self, event: events.Event) -> None:
        """Handle one event. Steps and evaluations that are repeated after a loss count once."""
        match event:
            case events.Began(step):
                self._begin(step)
            case events.StepDone(step) if step > self.step:
                self.folder.add(dict(vars(event)))
                self.tracker.stamp()
                self.losses.clear()
                report = StepReport(
                    event.generalization_loss, event.locality_loss, event.meta_loss, event.grad_norm, event.seconds
                )
                self.listener.step(step, report)
                if warning := no_progress(self.folder.history, self.folder.config):
                    self.listener.event(warning)
            case events.Evaluated(step, scores) if not self.folder.has_scores(step):
                self.folder.add(dict(vars(event)))
                self.tracker.stamp()
                self.folder.flush()
                self.listener.evaluation(step, scores)
            case events.Saving():
                self.folder.flush()
            case events.Saved(step):
                check_shared(self.folder.store, step)
            case events.ActorsLost(reason):
                self._count_loss("hypernet actors", reason)
            case events.WorkersLost(reason):
                self._count_loss("LM workers", reason)
            case events.Remark(text):
                self.listener.event(text)
            case events.Failed(error):
                raise error

    def _begin(self, step: int) -> None:
        """When the ranks begin for the first time, later rows in the history are those of steps that a killed driver
        did not save. Ranks that begin again repeat steps that are written, to the same numbers."""
        if not self.begun:
            self.begun = True
            self.folder.cut(step)
            self.tracker.follow(self.folder.history)

    def _count_loss(self, role: str, reason: str) -> None:
        self.losses[role] += 1
        limit = self.folder.config.cluster.max_failures
        if self.losses[role] > limit:
            raise EditError(
                f"{role} were lost {self.losses[role]} times before step {self.step + 1} was done, more than "
                f"cluster.max_failures={limit}; the last time: {reason}. The same command resumes the run from its "
                "last checkpoint"
            )
        self.listener.event(f"after step {self.step}: {role} were lost ({reason}); restoring them")

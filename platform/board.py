"""The notice board: LM ranks post events on it, and the driver reads them."""

from __future__ import annotations

import time

from malmen.platform.events import Event, LMReport


class Board:
    """A small Ray actor on the driver's node. It outlives the LM ranks; if it is lost, so is the driver."""

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

"""The notice board: where the LM ranks say what they do, and from where the driver reads it."""

from __future__ import annotations

import time
from typing import Any


class Board:
    """A small Ray actor. If it is lost, so is the driver."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._in_hand = False  # whether the driver has rows that it has not written yet
        self._doing: dict[str, tuple[str, float]] = {}
        self._stopped = False

    def note(self, who: str, doing: str) -> None:
        """What somebody does now."""
        self._doing[who] = (doing, time.time())

    def record(self, row: dict[str, Any]) -> None:
        """Something for the run's history."""
        self._rows.append(row)

    def take(self) -> list[dict[str, Any]]:
        """The rows since the last time. Who asks again has written those it got before."""
        rows, self._rows = self._rows, []
        self._in_hand = bool(rows)
        return rows

    def written(self) -> bool:
        """Whether the driver has written all rows."""
        return not (self._rows or self._in_hand)

    def doing(self) -> list[str]:
        """Who does what, for people."""
        now = time.time()
        return [f"{who}: {doing} for {now - since:.0f} s" for who, (doing, since) in sorted(self._doing.items())]

    def stop(self) -> None:
        """The run shall end before its time."""
        self._stopped = True

    def stopped(self) -> bool:
        """Whether it shall."""
        return self._stopped

"""Trials that go wrong in chosen ways."""

from __future__ import annotations

from malmen.config import Config
from malmen.tune.trial import SweepTrial, _Run


class _Senseless(_Run):
    def run(self) -> None:
        self.events.put((1, {"locality_agreement": float("nan")}))


class _Hanging(_Run):
    def run(self) -> None:
        self.stopping.wait(120)


class UnsoundTrial(SweepTrial):
    """As any other, but for three of them: one's score is NaN, one raises, of one nothing is ever heard."""

    SENSELESS, RAISES, HANGS = 2, 3, 4

    def start(self, run: _Run) -> _Run:
        number, raw = self.record.number, run.config.model_dump(mode="json")
        if number == self.SENSELESS:
            run = _Senseless(run.config, run.path, None)
        if number == self.RAISES:  # as when the model's folder has been moved meanwhile
            run.config = Config.model_validate({**raw, "model": {**raw["model"], "name": "/nowhere/model"}})
        if number == self.HANGS:
            self.sweep = self.sweep.model_copy(update={"trial_seconds": 1.0})
            run = _Hanging(run.config, run.path, None)
        return super().start(run)

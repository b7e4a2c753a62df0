"""One trial: a training run of the platform, in a Ray Train run of its own, that tells Ray Tune how it is doing."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.tune import Trainable

from malmen.config import Config
from malmen.errors import EditError
from malmen.metrics import score
from malmen.platform.cli.output import mean_seconds
from malmen.platform.train import Listener, TrainedEditor, train
from malmen.runs.run_folder import run_evaluations, run_facts
from malmen.tune.space import trial_config
from malmen.tune.sweep_folder import Judgement, SweepFolder


class SweepTrial(Trainable):
    """Ray Tune asks for one evaluation after the other. Those that the trial's record holds are told again, so that a
    sweep that goes on judges as if it had never been away; then the run goes on from its last checkpoint."""

    def setup(self, config: dict[str, Any], *, sweep_folder: str, parent: str | None) -> None:  # type: ignore[override]
        """Read what is known. Nothing is started yet: Ray Tune may give the trial to another process all the same."""
        self.folder, self.parent = SweepFolder(Path(sweep_folder)), parent
        self.base, self.sweep, _ = self.folder.load()
        record = self.folder.get(config["number"])
        assert record is not None, "the search writes a trial down before Ray Tune starts it"
        self.record = record
        self.spent = record.last.seconds if record.last else 0.0
        self.run: _Run | None = None
        self.known: deque[Judgement] | None = None  # evaluations to be told again

    def _begin(self) -> deque[Judgement]:
        """Begin, or go on; a trial that has ended is not run again."""
        self.began = time.monotonic()
        if not self.record.ended:
            for step, scores in run_evaluations(self.folder.trial_path(self.record.number)):  # not told before a kill
                self._take(step, scores)
            config = trial_config(self.base, self.sweep, self.record.params)
            self.run = self.start(_Run(config, self.folder, self.record.number, self.parent))
        # The last step's is told when the run has ended too, as by a trial that was never interrupted.
        steps = self.base.training.steps
        return deque(found for found in self.record.judgements if self.record.ended or found.step < steps)

    def start(self, run: _Run) -> _Run:
        """Set the training going."""
        run.start()
        return run

    def step(self) -> dict[str, Any]:
        """The next evaluation; what goes wrong fails this trial and not the sweep."""
        try:
            if self.known is None:
                self.known = self._begin()
            if self.known:
                judgement = self.known.popleft()
                done = self.record.ended and not self.known and self.record.status != "failed"
                # Whether the newest one of a trial under way was judged before the sweep was killed is not known.
                told = self.record.ended or judgement != self.record.last
                return self._result(judgement, done=done, told=told)
            return self._next() if self.run is not None else self._failed_result()
        except EditError as error:
            self._stop()
            self._write(status="failed", why=str(error))
            return self._failed_result()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial in the same process, which has imported everything already."""
        self._stop()  # one that does not end in time ends later: it has been told to
        self.setup(new_config)  # type: ignore[call-arg]  # tune.with_parameters adds what is missing
        return True

    def cleanup(self) -> None:
        """Ray Tune wants no more of it."""
        self._stop()

    def _next(self) -> dict[str, Any]:
        """The next evaluation that is not in the record yet; the last one when the run has ended too."""
        assert self.run is not None
        while True:
            found = self._wait()
            if isinstance(found, BaseException):
                raise found if isinstance(found, EditError) else EditError(f"{type(found).__name__}: {found}")
            if isinstance(found, TrainedEditor):
                self._take(found.steps, found.scores)
                self._write(status="finished", seconds_per_step=mean_seconds(found.history))
                assert self.record.last is not None
                return self._result(self.record.last, done=True)
            judgement = self._take(*found)
            if judgement and judgement.step < self.run.config.training.steps:
                return self._result(judgement, done=False)

    def _wait(self) -> Any:
        assert self.run is not None
        left = self.sweep.trial_seconds - self._seconds()
        try:
            return self.run.happened.get(timeout=max(0.0, left))
        except queue.Empty:
            raise EditError(f"it took longer than trial_seconds={self.sweep.trial_seconds:g} of the space") from None

    def _take(self, step: int, scores: dict[str, Any]) -> Judgement | None:
        """An evaluation into the record, if it is not in it."""
        if self.record.last and step <= self.record.last.step:
            return None
        value = score(scores, self.sweep.score)
        if value is None or not math.isfinite(value):
            named = {name: scores.get(name) for name in self.sweep.score}
            raise EditError(f"step {step}: the score is {value}, of {named}; expected a number")
        judgement = Judgement(step, value, scores, self._seconds())
        self.record = self.record.judged(judgement)
        self._write()
        return judgement

    def _seconds(self) -> float:
        return self.spent + time.monotonic() - self.began

    def _write(self, **changes: Any) -> None:
        run = run_facts(self.folder.trial_path(self.record.number)).get("mlflow_run")
        self.record = replace(self.record, tracking_run=run, **changes)
        self.folder.put(self.record)

    def _result(self, judgement: Judgement, *, done: bool, told: bool = False) -> dict[str, Any]:
        """What Ray Tune hears; `told`: it was judged before."""
        return {"step": judgement.step, "score": judgement.score, "failed": "", "done": done, "told": told}

    def _failed_result(self) -> dict[str, Any]:
        """The end of a trial that failed: to early stopping, the least score there is."""
        step = self.record.last.step if self.record.last else 0
        return {"step": step, "score": 0.0, "failed": self.record.why, "done": True, "told": False}

    def _stop(self) -> None:
        if self.run is not None:
            self.run.stopping.set()
            self.run.join(90)


class _Run(threading.Thread):
    """The training, beside the calls of Ray Tune."""

    def __init__(self, config: Config, folder: SweepFolder, number: int, parent: str | None) -> None:
        super().__init__(name="trial", daemon=True)
        self.config, self.path, self.parent = config, folder.trial_path(number), parent
        self.happened: queue.Queue[Any] = queue.Queue()  # (step, scores) …, then TrainedEditor or an exception
        self.stopping = threading.Event()

    def run(self) -> None:
        listener = Listener(
            evaluation=lambda step, scores: self.happened.put((step, scores)), stopped=self.stopping.is_set
        )
        resume = bool(run_facts(self.path))
        try:
            trained = train(
                self.config, self.path, resume=resume, listener=listener, parent=self.parent, register=False,
                resolve_paths=False,  # the sweep's driver has seen to that
            )  # fmt: skip
            self.happened.put(trained)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it fails this trial and not the sweep
            self.happened.put(error)

"""One trial: its config, and the training run of the platform that reports its evaluations to Ray Tune."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.tune import Trainable

from malmen.config import Config, parse_config, set_key
from malmen.errors import EditError
from malmen.metrics import score
from malmen.platform.cli.output import mean_seconds
from malmen.platform.train import Listener, TrainedEditor, train
from malmen.runs.run_folder import run_evaluations, run_facts
from malmen.tune.settings import LAYERS, SweepConfig
from malmen.tune.sweep_folder import Judgement, SweepFolder

STOP_SECONDS = 90.0  # that a stopped training has to end before the trial's process is used for another


def trial_config(base: Config, sweep: SweepConfig, params: Mapping[str, Any]) -> Config:
    """The config of one trial: the sweep's, with the trial's parameters."""
    raw = base.model_dump(mode="json")
    for name, value in params.items():
        if name != LAYERS:
            set_key(raw, name, value)
            continue
        layer_set = sweep.layer_sets[value]
        raw["editor"]["layers"] = layer_set.layers
        raw["editor"]["ffn"] = layer_set.ffn or raw["editor"]["ffn"]
    return parse_config(raw, "the trial " + ", ".join(f"{name}={value}" for name, value in params.items()))


class SweepTrial(Trainable):
    """Gives Ray Tune one evaluation after the other.

    First come those of the trial's record, so that a resumed sweep judges as if it had not been interrupted. Then the
    run is resumed from its last checkpoint.
    """

    def setup(self, config: dict[str, Any], *, sweep_folder: str, parent: str | None) -> None:  # type: ignore[override]
        """Read the trial's record. Nothing starts yet: Ray Tune may still move the trial to another process."""
        self.folder, self.parent = SweepFolder(Path(sweep_folder)), parent
        self.base, self.sweep, _ = self.folder.load()
        record = self.folder.get(config["number"])
        assert record is not None, "the search writes a trial's record before Ray Tune starts the trial"
        self.record = record
        self.spent = record.last.seconds if record.last else 0.0
        self.run: _Run | None = None
        self.recorded: deque[Judgement] | None = None  # evaluations to report again

    def _begin(self) -> deque[Judgement]:
        """Start or resume the run, unless the trial has ended; the evaluations to report again."""
        self.began = time.monotonic()
        if not self.record.ended:
            for step, scores in run_evaluations(
                self.folder.trial_path(self.record.number)
            ):  # not recorded before a kill
                self._record_evaluation(step, scores)
            config = trial_config(self.base, self.sweep, self.record.params)
            self.run = self.start(_Run(config, self.folder, self.record.number, self.parent))
        # The last step's is reported when the run has ended too, as by a trial that was never interrupted.
        steps = self.base.training.steps
        return deque(judged for judged in self.record.judgements if self.record.ended or judged.step < steps)

    def start(self, run: _Run) -> _Run:
        """Start the training."""
        run.start()
        return run

    def step(self) -> dict[str, Any]:
        """The next evaluation. An error fails this trial, not the sweep."""
        try:
            if self.recorded is None:
                self.recorded = self._begin()
            if self.recorded:
                judgement = self.recorded.popleft()
                done = self.record.ended and not self.recorded and self.record.status != "failed"
                # Whether the newest one of a trial under way was judged before the sweep was killed is unknown.
                replayed = self.record.ended or judgement != self.record.last
                return self._result(judgement, done=done, replayed=replayed)
            return self._next() if self.run is not None else self._failed_result()
        except EditError as error:
            self._stop()
            self._write(status="failed", why=str(error))
            return self._failed_result()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Use this process, which has imported everything already, for another trial."""
        self._stop()  # a training that does not end in time ends later: `stopping` stays set
        self.setup(new_config)  # type: ignore[call-arg]  # tune.with_parameters adds what is missing
        return True

    def cleanup(self) -> None:
        """Stop the training; Ray Tune has ended the trial."""
        self._stop()

    def _next(self) -> dict[str, Any]:
        """The next evaluation that is not in the record yet; the last one when the run has ended too."""
        assert self.run is not None
        while True:
            event = self._wait()
            if isinstance(event, BaseException):
                raise event if isinstance(event, EditError) else EditError(f"{type(event).__name__}: {event}")
            if isinstance(event, TrainedEditor):
                self._record_evaluation(event.steps, event.scores)
                self._write(status="finished", seconds_per_step=mean_seconds(event.history))
                assert self.record.last is not None
                return self._result(self.record.last, done=True)
            judgement = self._record_evaluation(*event)
            if judgement and judgement.step < self.run.config.training.steps:
                return self._result(judgement, done=False)

    def _wait(self) -> TrialEvent:
        assert self.run is not None
        left = self.sweep.trial_seconds - self._seconds()
        try:
            return self.run.events.get(timeout=max(0.0, left))
        except queue.Empty:
            raise EditError(
                f"the trial took longer than trial_seconds={self.sweep.trial_seconds:g} of the space"
            ) from None

    def _record_evaluation(self, step: int, scores: dict[str, Any]) -> Judgement | None:
        """Add an evaluation to the record; None if the record has it."""
        if self.record.last and step <= self.record.last.step:
            return None
        value = score(scores, self.sweep.score)
        if value is None or not math.isfinite(value):
            parts = {name: scores.get(name) for name in self.sweep.score}
            raise EditError(f"step {step}: the score is {value}, of {parts}; expected a number")
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

    def _result(self, judgement: Judgement, *, done: bool, replayed: bool = False) -> dict[str, Any]:
        """An evaluation for Ray Tune; `replayed`: it was judged before the sweep was killed."""
        return {"step": judgement.step, "score": judgement.score, "failed": "", "done": done, "replayed": replayed}

    def _failed_result(self) -> dict[str, Any]:
        """The end of a trial that failed: the lowest score, for early stopping."""
        step = self.record.last.step if self.record.last else 0
        return {"step": step, "score": 0.0, "failed": self.record.why, "done": True, "replayed": False}

    def _stop(self) -> None:
        if self.run is not None:
            self.run.stopping.set()
            self.run.join(STOP_SECONDS)


TrialEvent = tuple[int, dict[str, Any]] | TrainedEditor | BaseException  # an evaluation, the end, or an error


class _Run(threading.Thread):
    """The training, in a thread beside the calls of Ray Tune."""

    def __init__(self, config: Config, folder: SweepFolder, number: int, parent: str | None) -> None:
        super().__init__(name="trial", daemon=True)
        self.config, self.path, self.parent = config, folder.trial_path(number), parent
        self.events: queue.Queue[TrialEvent] = queue.Queue()
        self.stopping = threading.Event()

    def run(self) -> None:
        listener = Listener(
            evaluation=lambda step, scores: self.events.put((step, scores)), stopped=self.stopping.is_set
        )
        resume = bool(run_facts(self.path))
        try:
            trained = train(
                self.config, self.path, resume=resume, listener=listener, parent=self.parent, register=False,
                resolve_paths=False,  # the sweep's driver has seen to that
            )  # fmt: skip
            self.events.put(trained)
        except BaseException as error:  # noqa: BLE001 - any error fails this trial, not the sweep
            self.events.put(error)

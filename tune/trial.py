"""One trial: its config, and the training run of the platform that reports its evaluations to Ray Tune."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator, Mapping
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
        raw["editor"] |= layer_set.model_dump(exclude_none=True)
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
        self.run: _Run | None = None
        self.results = self._repeat() if record.ended else self._train()

    def start(self, run: _Run) -> _Run:
        """Start the training."""
        run.start()
        return run

    def step(self) -> dict[str, Any]:
        """The next evaluation. An error fails this trial, not the sweep."""
        try:
            return next(self.results)
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

    def _repeat(self) -> Iterator[dict[str, Any]]:
        """The evaluations of a trial that has ended; one that failed ends as failed again."""
        for judgement in self.record.judgements:
            done = judgement is self.record.last and self.record.status != "failed"
            yield self._result(judgement, done=done, replayed=True)
        yield self._failed_result()

    def _train(self) -> Iterator[dict[str, Any]]:
        """The evaluations of the record, then those of the run, which this starts or resumes."""
        path, steps = self.folder.trial_path(self.record.number), self.base.training.steps
        self.began = time.monotonic() - (self.record.last.seconds if self.record.last else 0.0)
        for step, scores in run_evaluations(path):  # not recorded before a kill
            self._record_evaluation(step, scores)
        config = trial_config(self.base, self.sweep, self.record.params)
        self.run = self.start(_Run(config, path, self.parent))
        for judgement in self.record.judgements:
            # The last step's is reported when the run has ended too, as by a trial that was never interrupted.
            if judgement.step < steps:
                # Whether the newest one was judged before the sweep was killed is unknown.
                yield self._result(judgement, replayed=judgement != self.record.last)
        while not isinstance(event := self._wait(self.run), TrainedEditor):
            new = self._record_evaluation(*event)
            if new and new.step < steps:
                yield self._result(new)
        self._record_evaluation(event.steps, event.scores)
        self._write(status="finished", seconds_per_step=mean_seconds(event.history))
        assert self.record.last is not None
        yield self._result(self.record.last, done=True)

    def _wait(self, run: _Run) -> Evaluated | TrainedEditor:
        left = self.sweep.trial_seconds - (time.monotonic() - self.began)
        try:
            event = run.events.get(timeout=max(0.0, left))
        except queue.Empty:
            raise EditError(
                f"the trial took longer than trial_seconds={self.sweep.trial_seconds:g} of the space"
            ) from None
        if isinstance(event, BaseException):
            raise event if isinstance(event, EditError) else EditError(f"{type(event).__name__}: {event}")
        return event

    def _record_evaluation(self, step: int, scores: dict[str, Any]) -> Judgement | None:
        """Add an evaluation to the record; None if the record has it."""
        if self.record.last and step <= self.record.last.step:
            return None
        value = score(scores, self.sweep.score)
        if value is None or not math.isfinite(value):
            parts = {name: scores.get(name) for name in self.sweep.score}
            raise EditError(f"step {step}: the score is {value}, of {parts}; expected a number")
        judgement = Judgement(step, value, scores, time.monotonic() - self.began)
        self.record = self.record.judged(judgement)
        self._write()
        return judgement

    def _write(self, **changes: Any) -> None:
        run = run_facts(self.folder.trial_path(self.record.number)).get("mlflow_run")
        self.record = replace(self.record, tracking_run=run, **changes)
        self.folder.put(self.record)

    def _result(self, judgement: Judgement, *, done: bool = False, replayed: bool = False) -> dict[str, Any]:
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


Evaluated = tuple[int, dict[str, Any]]  # step and scores


class _Run(threading.Thread):
    """The training, in a thread beside the calls of Ray Tune. Its events are evaluations, then its end or an error."""

    def __init__(self, config: Config, path: Path, parent: str | None) -> None:
        super().__init__(name="trial", daemon=True)
        self.config, self.path, self.parent = config, path, parent
        self.events: queue.Queue[Evaluated | TrainedEditor | BaseException] = queue.Queue()
        self.stopping = threading.Event()

    def run(self) -> None:
        listener = Listener(
            evaluation=lambda step, scores: self.events.put((step, scores)), stopped=self.stopping.is_set
        )
        try:
            trained = train(
                self.config, self.path, resume=bool(run_facts(self.path)), listener=listener, parent=self.parent,
                register=False, resolve_paths=False,  # the sweep's driver has seen to the paths
            )  # fmt: skip
            self.events.put(trained)
        except BaseException as error:  # noqa: BLE001 - any error fails this trial, not the sweep
            self.events.put(error)

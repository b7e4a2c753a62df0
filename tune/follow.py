"""What the driver of a sweep does at each event of a trial: record, MLflow run, listener."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ray.tune import Callback

from malmen.config import Config
from malmen.errors import EditError, last_line
from malmen.platform.tracking.store import brief, connect, find_experiment, redact_credentials, store_errors
from malmen.platform.tracking.watcher import DRIVER_TAG
from malmen.runs.run_folder import run_facts
from malmen.tune.sweep_folder import SweepFolder, TrialRecord

logger = logging.getLogger(__name__)

SWEEP_DRIVER = "sweep"  # owns an MLflow run that the sweep has ended: the trial's process leaves it alone


@dataclass
class ProgressListener:
    """Callbacks of a sweep or an experiment: `progress` with pieces done and pieces in all, `event` with a remark."""

    progress: Callable[[int, int], None] = lambda _done, _total: None
    event: Callable[[str], None] = lambda _text: None


class Follower(Callback):
    """Ray Tune's callback in the driver."""

    def __init__(self, folder: SweepFolder, config: Config, listener: ProgressListener, total: int) -> None:
        self.folder, self.config, self.listener = folder, config, listener
        self.ended, self.total = 0, total

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune pickles its callbacks into its own notes, which are never read."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial has its process."""
        record = self._record(trial)
        if not record.judgements:
            params = ", ".join(f"{name} {short_text(value)}" for name, value in record.params.items())
            self.listener.event(f"trial {record.number} starts: {params}")

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
        """The trial was evaluated."""
        record = self._record(trial)
        if record.last and not record.ended:
            self.listener.event(f"trial {record.number} step {record.last.step}: score {record.last.score:.3f}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial finished or failed, or early stopping ended it."""
        record = self._record(trial)
        if not record.ended:
            assert record.last is not None
            record = replace(record, status="stopped", why=f"early stopping after step {record.last.step}")
        self._end(record)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial's process was lost more often than cluster.max_failures allows."""
        record = self._record(trial)
        why = f"its process was lost: {last_line(trial.get_error())}"
        self._end(record if record.ended else replace(record, status="failed", why=why))

    def _record(self, trial: Any) -> TrialRecord:
        record = self.folder.get(trial.config["number"])
        assert record is not None
        return record

    def _end(self, record: TrialRecord) -> None:
        if record.tracking_run is None:  # it was lost before its first evaluation
            record = replace(record, tracking_run=run_facts(self.folder.trial_path(record.number)).get("mlflow_run"))
        self.folder.put(record)
        end_tracking_run(self.config, self.folder, record)
        score = f"score {record.last.score:.3f} at step {record.last.step}" if record.last else "no score"
        why = f", {record.why}" if record.why else ""
        self.listener.event(f"trial {record.number} {record.status}: {score}{why}")
        self.ended += 1
        self.listener.progress(self.ended, self.total)


def short_text(value: Any) -> str:
    """A parameter's value, for a line or a table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def end_tracking_run(config: Config, folder: SweepFolder, record: TrialRecord) -> None:
    """End a trial's MLflow run as the trial ended, with its parameters and score; a trial without a run gets one."""
    uri, run = config.tracking.uri, record.tracking_run
    if uri is None:  # the sweep is not tracked
        return
    try:
        client = connect(uri)
        if run is None:  # the trial failed before its training had one
            parent = folder.load()[2].get("mlflow_run")
            experiment = find_experiment(client, config.tracking.experiment, uri)
            of_parent = {"mlflow.parentRunId": parent} if parent else {}
            name = folder.trial_path(record.number).name
            run = str(client.create_run(experiment, tags=of_parent, run_name=name).info.run_id)
            folder.put(replace(record, tracking_run=run))
        client.set_tag(run, DRIVER_TAG, SWEEP_DRIVER)
        client.set_terminated(run, "FAILED" if record.status == "failed" else "FINISHED")
        tags = {"number": record.number, "status": record.status, "why": record.why, **record.params}
        for name, value in tags.items():
            client.set_tag(run, f"sweep.{name}", str(value))
        if record.last is not None:
            client.log_metric(run, "sweep/score", record.last.score, step=record.last.step)
    except store_errors() + (EditError,) as error:  # noqa: RUF005 - mypy knows no other; EditError: a deleted experiment
        logger.warning("trial %d could not be ended in %s: %s", record.number, redact_credentials(uri), brief(error))

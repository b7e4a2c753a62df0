"""One MLflow run, written by the driver of a training, a sweep or an experiment.

A thread sends the rows. They stay in memory until the store has them, so nothing is lost while it is away, and training
neither waits for it nor fails because of it. (MLflow's own asynchronous logging would drop what it cannot send.)
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import accumulate, takewhile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import malmen
from malmen.config import Config, TrackingConfig, flatten
from malmen.errors import RunStopped
from malmen.platform.tracking.store import (
    ANSWER_SECONDS,
    brief,
    check_reachable,
    clear_errors,
    connect,
    find_experiment,
    redact_credentials,
    safe_name,
    store_errors,
)
from malmen.platform.tracking.watcher import DRIVER_TAG, ENDED, end_run, start_watcher
from malmen.runs.files import json_text

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    from malmen.platform.tracking.registry import RegisteredEditor

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | None]
Status = Literal["FINISHED", "FAILED", "KILLED"]

METRICS_PER_CALL, PARAMS_PER_CALL, PARAM_LENGTH = 1000, 100, 6000  # MLflow's limits
_MARKS = ("loss/meta", "held_out/edit_success")  # every row of a history has one of them


def tracking_uri(config: TrackingConfig, folder: str) -> str:
    """Where a run in `folder` is tracked: as configured, as in the environment, else mlflow.db beside the folder."""
    if uri := config.uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    folder = folder.removeprefix("file://")
    beside = Path("runs") if "://" in folder else Path(folder).resolve().parent
    return f"sqlite:///{beside.resolve() / 'mlflow.db'}"


@dataclass
class Tracker:
    """`with Tracker.start(config, folder, tags) as tracker:`; without tracking it does nothing."""

    config: Config
    uri: str = ""
    client: MlflowClient | None = None
    run_id: str | None = None
    driver: str = ""
    send_seconds: float = 5.0

    def __post_init__(self) -> None:
        self.unsent: list[list[Metric]] = []  # rows that the store lacks
        self._stored: set[tuple[str, int]] = set()  # what it had when the run was resumed: mark and step
        self._status: Status | None = None  # as which the run is to end
        self._finishing, self._ended = threading.Event(), False
        if self.client is not None and self.run_id is not None:
            self._watcher = start_watcher(self.uri, self.run_id, self.driver)
            marks = {name: self.client.get_metric_history(self.run_id, name) for name in _MARKS}
            self._stored = {(name, metric.step) for name, metrics in marks.items() for metric in metrics}
            self._sender = threading.Thread(
                target=self._keep_sending, args=(self.client, self.run_id), name="mlflow", daemon=True
            )
            self._sender.start()

    @classmethod
    def start(
        cls, config: Config, folder: str, tags: Mapping[str, str], run_id: str | None = None,
        parent: str | None = None, send_seconds: float = 5.0,
    ) -> Tracker:  # fmt: skip
        """A new run named after the folder, or `run_id` again where it still exists."""
        if not config.tracking.enabled:
            return cls(config)
        uri = tracking_uri(config.tracking, folder)
        driver = uuid.uuid4().hex
        with clear_errors(uri), ExitStack() as unless_started:
            client = connect(uri)
            own = {DRIVER_TAG: driver, **_versions(), **({"mlflow.parentRunId": parent} if parent else {})}
            if run_id is not None and run_exists(client, run_id):
                client.set_tag(run_id, DRIVER_TAG, driver)
                client.update_run(run_id, status="RUNNING")
            else:
                from mlflow.tracking.context.registry import resolve_tags  # user, source, git commit

                experiment = find_experiment(client, config.tracking.experiment, uri)
                name = folder.rstrip("/").rpartition("/")[2]
                run_id = client.create_run(experiment, tags=resolve_tags(own), run_name=name).info.run_id
            tracker = unless_started.enter_context(cls(config, uri, client, run_id, driver, send_seconds))
            _describe(client, run_id, config, {**own, **tags})
            unless_started.pop_all()
        return tracker

    def log(self, step: int, metrics: Metrics) -> None:
        """Send metrics soon; None and NaN are left out."""
        if self.client is None:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)  # not when they are sent: the store may be away
        known = {name: value for name, value in metrics.items() if value is not None and not math.isnan(value)}
        if not any((name, step) in self._stored for name in known):
            self.unsent.append([Metric(safe_name(name), float(value), now, step) for name, value in known.items()])

    def log_row(self, row: Mapping[str, Any]) -> None:
        """Send a row of a training's history, a step or an evaluation, unless a resumed run's store has it already."""
        metrics = {f"held_out/{name}": value for name, value in row.get("scores", {}).items()}
        metrics |= {f"loss/{name}": row.get(f"{name}_loss") for name in ("generalization", "locality", "meta")}
        metrics |= {name: row.get(name) for name in ("grad_norm", "bytes_moved", "cache_mb")}
        metrics["seconds/step"] = row.get("wall")
        for group in ("seconds", "damping", "edit_lr"):
            metrics |= {f"{group}/{name}": value for name, value in row.get(group, {}).items()}
        for role in ("hypernet", "lm"):
            for index, peaks in enumerate(row.get(f"{role}_memory", [])):
                metrics |= {f"memory_mb/{role}{index}/{device}": peak for device, peak in peaks.items()}
        self.log(row["step"], metrics)

    def log_artifacts(self, local_folder: Path, name: str) -> None:
        """The files of a folder as an artifact."""
        if self.client is None or self.run_id is None:
            return
        try:
            check_reachable(self.uri)
            self.client.log_artifacts(self.run_id, str(local_folder), name)
        except store_errors() as error:
            logger.warning("%s could not be written to %s: %s", name, redact_credentials(self.uri), brief(error))

    def register(self, checkpoint: Path) -> RegisteredEditor | None:
        """A new version of the editor in the model registry."""
        if self.client is None or self.run_id is None:
            return None
        from malmen.platform.tracking.registry import register_editor

        with clear_errors(self.uri):
            return register_editor(self.client, self.run_id, checkpoint, self.config)

    def finish(self, status: Status = "FINISHED") -> None:
        """Send the rest and end the run; where the store is away, the watcher keeps trying to end it."""
        if self.client is None or self._finishing.is_set():
            return
        self._status = status
        self._finishing.set()
        unsent = -1
        while self._sender.is_alive() and unsent != len(self.unsent):  # while there is progress
            unsent = len(self.unsent)
            self._sender.join(2 * ANSWER_SECONDS)
        if not self._ended:
            place = redact_credentials(self.uri)
            logger.warning(
                "the run could not be ended as %s in %s; %d rows were not sent", status, place, len(self.unsent)
            )
        with suppress(subprocess.TimeoutExpired):
            self._watcher.communicate(f"{ENDED if self._ended else status}\n".encode(), timeout=ANSWER_SECONDS)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish("FINISHED")
        else:
            self.finish("KILLED" if issubclass(kind, KeyboardInterrupt | SystemExit | RunStopped) else "FAILED")

    # --- the thread -------------------------------------------------------------------------------------

    def _keep_sending(self, client: MlflowClient, run_id: str) -> None:
        """Until the run is to end."""
        failing = False
        status: Status | None = None
        while status is None:
            self._finishing.wait(self.send_seconds)
            status = self._status  # as it was before the last rows are sent
            try:
                self._send_rows(client, run_id)
                if status is not None:
                    end_run(client, run_id, self.driver, status)
                    self._ended = True
                failing = False
            except store_errors() as error:
                if not failing:
                    logger.warning("metrics cannot be sent to %s now: %s", redact_credentials(self.uri), brief(error))
                failing = True

    def _send_rows(self, client: MlflowClient, run_id: str) -> None:
        """As many rows in a call as fit: the store has all of a row or nothing of it, unless the row alone is larger.
        After an error the next call repeats such a row; the store drops a metric that it has."""
        while self.unsent:
            check_reachable(self.uri)  # else MLflow's own retries: minutes, each with a warning
            sizes = takewhile(lambda size: size <= METRICS_PER_CALL, accumulate(len(row) for row in self.unsent))
            count = max(1, len(list(sizes)))
            batch = [metric for row in self.unsent[:count] for metric in row]
            for first in range(0, len(batch), METRICS_PER_CALL):
                client.log_batch(run_id, metrics=batch[first : first + METRICS_PER_CALL], synchronous=True)
            del self.unsent[:count]


# --- pieces ------------------------------------------------------------------------------------------


def run_exists(client: MlflowClient, run_id: str) -> bool:
    """Whether this store has such a run, and it is not deleted."""
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def _describe(client: MlflowClient, run_id: str, config: Config, tags: Mapping[str, str]) -> None:
    """The config as params and as a file. MLflow's params never change: a resumed run's changes become tags."""
    from mlflow.entities import Param, RunTag

    raw = json.loads(redact_credentials(config.model_dump_json()))
    params = {
        safe_name(key): (value if isinstance(value, str) else json.dumps(value))[:PARAM_LENGTH]
        for key, value in flatten(raw).items()
    }
    before = client.get_run(run_id).data.params
    changed = {f"resumed.{key}": value for key, value in params.items() if before.get(key, value) != value}
    fresh = [Param(key, value) for key, value in params.items() if key not in before]
    for first in range(0, len(fresh), PARAMS_PER_CALL):
        client.log_batch(run_id, params=fresh[first : first + PARAMS_PER_CALL], synchronous=True)
    run_tags = [RunTag(key, str(value)) for key, value in {**tags, **changed}.items()]
    client.log_batch(run_id, tags=run_tags, synchronous=True)
    client.log_text(run_id, json_text(raw), "config.json")


def _versions() -> dict[str, str]:
    versions = {"version.malmen": malmen.__version__, "version.python": sys.version.split()[0]}
    for name in ("torch", "transformers", "ray", "deepspeed", "mlflow"):
        with suppress(metadata.PackageNotFoundError):
            versions[f"version.{name}"] = metadata.version(name)
    return versions

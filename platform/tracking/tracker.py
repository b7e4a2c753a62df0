"""One MLflow run, written by the driver of a training, a sweep or an experiment.

A thread sends the rows of the run's history that the store lacks: the history is on disk before, so nothing is lost
while the store is away, and training neither waits for it nor fails because of it. (MLflow's own asynchronous logging
would drop what it cannot send.)
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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import metadata
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
from malmen.platform.tracking.watcher import DRIVER_TAG, ENDED, end_run

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


def history_metrics(row: Mapping[str, Any]) -> tuple[int, Metrics]:
    """The step and the metrics of a row of a run's history, a step or an evaluation. `--local` writes fewer keys."""
    metrics = {f"held_out/{name}": value for name, value in row.get("scores", {}).items()}
    metrics |= {f"loss/{name}": row.get(f"{name}_loss") for name in ("generalization", "locality", "meta")}
    metrics |= {name: row.get(name) for name in ("grad_norm", "bytes_moved", "cache_mb")}
    metrics["seconds/step"] = row.get("wall")
    for group in ("seconds", "damping", "edit_lr"):
        metrics |= {f"{group}/{name}": value for name, value in row.get(group, {}).items()}
    for role in ("hypernet", "lm"):
        for index, peaks in enumerate(row.get(f"{role}_memory", [])):
            metrics |= {f"memory_mb/{role}{index}/{device}": peak for device, peak in peaks.items()}
    return row["step"], metrics


class Tracker:
    """`with Tracker.start(config, folder, tags) as tracker:`; without tracking it does nothing."""

    def __init__(
        self,
        config: Config,
        uri: str = "",
        client: MlflowClient | None = None,
        run_id: str | None = None,
        driver: str = "",
        send_seconds: float = 5.0,
    ) -> None:
        self.config, self.uri, self.run_id, self.driver = config, uri, run_id, driver
        self._client = client
        self._rows: list[Any] = []  # to be sent, in this order; only grows
        self._times: list[int] = []  # when they came, in milliseconds, as far as the driver said so
        self._read_row: Callable[[Any], tuple[int, Metrics]] = lambda row: row
        self._next = 0  # the first row that is not in `_batch` and was not sent
        self._batch: list[Metric] = []  # taken from the rows, not sent yet
        self._stored: dict[str, set[int]] | None = {}  # steps at which the store has a metric; None: to be asked
        self._ended = threading.Event()
        self._failing = False
        self._watcher: subprocess.Popen[bytes] | None = None
        self._sender = threading.Thread(target=self._keep_sending, args=(send_seconds,), name="mlflow", daemon=True)
        if client is not None and run_id is not None:
            self._watcher = _start_watcher(uri, run_id, driver)
            self._sender.start()

    @classmethod
    def start(
        cls,
        config: Config,
        folder: str,
        tags: Mapping[str, str],
        run_id: str | None = None,
        parent: str | None = None,
        send_seconds: float = 5.0,
    ) -> Tracker:
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
            tracker._describe(client, run_id, {**own, **tags})
            unless_started.pop_all()
        return tracker

    def follow(self, history: list[dict[str, Any]]) -> None:
        """Send the rows of a training's history, also those to be added, unless the store has them already."""
        assert not self._rows, "the rows of another history were given before"
        self._stored = None
        self._rows, self._read_row = history, history_metrics
        self.stamp()

    def stamp(self) -> None:
        """The rows that were added since the last call came now: a store that is away gets them later."""
        self._times += [int(time.time() * 1000)] * (len(self._rows) - len(self._times))

    def log(self, step: int, metrics: Metrics) -> None:
        """Send metrics soon; None and NaN are left out."""
        self._rows.append((step, metrics))
        self.stamp()

    def log_artifacts(self, local_folder: Path, name: str) -> None:
        """The files of a folder as an artifact."""
        if self._client is None or self.run_id is None:
            return
        try:
            check_reachable(self.uri)
            self._client.log_artifacts(self.run_id, str(local_folder), name)
        except store_errors() as error:
            logger.warning("%s could not be written to %s: %s", name, redact_credentials(self.uri), brief(error))

    def register(self, checkpoint: Path, base_model: str, metrics: Metrics, card: str) -> RegisteredEditor | None:
        """A new version of the editor in the model registry."""
        if self._client is None or self.run_id is None:
            return None
        from malmen.platform.tracking.registry import register_editor, registered_name

        with clear_errors(self.uri):
            name = registered_name(self.config)
            return register_editor(self._client, self.run_id, name, checkpoint, base_model, metrics, card)

    def finish(self, status: Status = "FINISHED") -> None:
        """Send the rest and end the run; where the store is away, the watcher keeps trying to end it."""
        if self._client is None or self.run_id is None or self._ended.is_set():
            return
        self._ended.set()
        last_line: str = ENDED
        try:
            self._sender.join(2 * ANSWER_SECONDS)
            if self._sender.is_alive():  # inside MLflow's own retries, which take minutes
                raise TimeoutError("the store does not answer")
            check_reachable(self.uri)
            self._send_rows()
            end_run(self._client, self.run_id, self.driver, status)
        except store_errors() as error:
            logger.warning(
                "the run could not be ended as %s in %s: %s", status, redact_credentials(self.uri), brief(error)
            )
            last_line = status
        if self._batch or self._next < len(self._rows):
            logger.warning("the last metrics were not sent to %s", redact_credentials(self.uri))
        assert self._watcher is not None
        _dismiss(self._watcher, last_line)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish("FINISHED")
        else:
            self.finish("KILLED" if issubclass(kind, KeyboardInterrupt | SystemExit | RunStopped) else "FAILED")

    # --- sending ----------------------------------------------------------------------------------------

    def _keep_sending(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            try:
                self._send_rows()
                self._failing = False
            except store_errors() as error:
                if not self._failing:
                    logger.warning("metrics cannot be sent to %s now: %s", redact_credentials(self.uri), brief(error))
                self._failing = True

    def _send_rows(self) -> None:
        """Send what is not sent yet; after an error, the next call resumes where this one stopped."""
        assert self._client is not None and self.run_id is not None
        while self._batch or self._next < len(self._rows):
            check_reachable(self.uri)  # else MLflow's own retries: minutes, each with a warning
            if self._stored is None:  # a resumed run
                marks = {name: self._client.get_metric_history(self.run_id, name) for name in _MARKS}
                self._stored = {name: {metric.step for metric in metrics} for name, metrics in marks.items()}
            self._batch = self._batch or self._next_batch(self._stored)
            if self._batch:
                self._client.log_batch(self.run_id, metrics=self._batch[:METRICS_PER_CALL], synchronous=True)
                del self._batch[:METRICS_PER_CALL]

    def _next_batch(self, stored: Mapping[str, set[int]]) -> list[Metric]:
        """The metrics of the next rows, as many as fit into one call: the store has all of a row or nothing of it,
        unless the row alone is larger."""
        from mlflow.entities import Metric

        batch: list[Metric] = []
        now = int(time.time() * 1000)
        while self._next < len(self._rows):
            step, metrics = self._read_row(self._rows[self._next])
            known = {name: value for name, value in metrics.items() if value is not None and not math.isnan(value)}
            if any(step in stored.get(name, ()) for name in known):
                known = {}
            if batch and len(batch) + len(known) > METRICS_PER_CALL:
                break
            came = self._times[self._next] if self._next < len(self._times) else now
            batch += [Metric(safe_name(name), float(value), came, step) for name, value in known.items()]
            self._next += 1
        return batch

    def _describe(self, client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
        """The config as params and as a file. MLflow's params never change: a resumed run's changes become tags."""
        from mlflow.entities import Param, RunTag

        config = json.loads(redact_credentials(self.config.model_dump_json()))
        params = {
            safe_name(key): (value if isinstance(value, str) else json.dumps(value))[:PARAM_LENGTH]
            for key, value in flatten(config).items()
        }
        before = client.get_run(run_id).data.params
        changed = {f"resumed.{key}": value for key, value in params.items() if before.get(key, value) != value}
        fresh = [Param(key, value) for key, value in params.items() if key not in before]
        for first in range(0, len(fresh), PARAMS_PER_CALL):
            client.log_batch(run_id, params=fresh[first : first + PARAMS_PER_CALL], synchronous=True)
        run_tags = [RunTag(key, str(value)) for key, value in {**tags, **changed}.items()]
        client.log_batch(run_id, tags=run_tags, synchronous=True)
        client.log_text(run_id, json.dumps(config, indent=1, ensure_ascii=False) + "\n", "config.json")


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


def _start_watcher(uri: str, run_id: str, driver: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "malmen.platform.tracking.watcher", run_id, driver],
        env={**os.environ, "MLFLOW_TRACKING_URI": uri},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what kills the driver's group, Ctrl-C for one, leaves it alive
    )


def _dismiss(watcher: subprocess.Popen[bytes], last_line: str) -> None:
    try:
        watcher.communicate(f"{last_line}\n".encode(), timeout=ANSWER_SECONDS if last_line == ENDED else 0.1)
    except subprocess.TimeoutExpired:
        logger.debug("the watcher %d is still busy", watcher.pid)


def _versions() -> dict[str, str]:
    versions = {"version.malmen": malmen.__version__, "version.python": sys.version.split()[0]}
    for name in ("torch", "transformers", "ray", "deepspeed", "mlflow"):
        try:
            versions[f"version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions

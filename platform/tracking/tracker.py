"""One MLflow run, written by the driver of a training. Training never waits for it and never fails because of it."""

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
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import malmen
from malmen.config import Config, TrackingConfig
from malmen.errors import RunStopped
from malmen.platform.tracking.store import (
    PATIENCE,
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

    from malmen.platform.tracking.registry import RegisteredEditor

logger = logging.getLogger(__name__)

_Row = list[tuple[str, float, int, int]]  # what was logged at once: name, value, timestamp, step
Status = Literal["FINISHED", "FAILED", "KILLED"]

MOST_PENDING = 300_000  # metrics that are kept while the store is away: some 100 MB
METRICS_PER_CALL, PARAMS_PER_CALL, PARAM_LENGTH = 1000, 100, 6000  # MLflow's limits


def tracking_uri(config: TrackingConfig, folder: str) -> str:
    """Where a run in `folder` is tracked: as configured, as in the environment, else mlflow.db beside the folder."""
    if uri := config.uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    folder = folder.removeprefix("file://")
    beside = Path("runs") if "://" in folder else Path(folder).resolve().parent
    return f"sqlite:///{beside.resolve() / 'mlflow.db'}"


class Tracker:
    """`with Tracker.start(config, folder, tags) as tracker:`; without tracking it does nothing."""

    def __init__(
        self,
        config: Config,
        uri: str = "",
        client: MlflowClient | None = None,
        run_id: str | None = None,
        watcher: subprocess.Popen[bytes] | None = None,
        flush_seconds: float = 5.0,
        driver: str = "",
    ) -> None:
        self.config, self.uri, self.run_id, self.driver = config, uri, run_id, driver
        self._client, self._watcher = client, watcher
        self._pending: deque[_Row] = deque()
        self._waiting = 0  # metrics in it
        self._sent: dict[str, set[int]] = {}  # steps at which the store has a metric, of those that were asked for
        self._buffer, self._sending = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._failing = False
        self._writer = threading.Thread(target=self._write, args=(flush_seconds,), name="mlflow", daemon=True)
        if client is not None:
            self._writer.start()

    @classmethod
    def start(
        cls,
        config: Config,
        folder: str,
        tags: Mapping[str, str],
        run_id: str | None = None,
        parent: str | None = None,
        flush_seconds: float = 5.0,
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
            watcher = _start_watcher(uri, run_id, driver)
            tracker = unless_started.enter_context(cls(config, uri, client, run_id, watcher, flush_seconds, driver))
            tracker._describe({**own, **tags})
            unless_started.pop_all()
        return tracker

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Put metrics down to be sent soon; None and NaN are left out, and all where the store has them already."""
        if self._client is None or self._ended.is_set():
            return
        known = {name: float(value) for name, value in metrics.items() if value is not None and not math.isnan(value)}
        if not known or any(step in self._sent.get(name, ()) for name in known):
            return
        now = int(time.time() * 1000)
        with self._buffer:
            self._pending.append([(safe_name(name), value, now, step) for name, value in known.items()])
            self._count(len(known))

    def flush(self) -> None:
        """Send what has gathered. What cannot be sent is kept for the next time."""
        if self._client is None or self.run_id is None:
            return
        from mlflow.entities import Metric

        with self._sending:
            while rows := self._take():
                try:
                    check_reachable(self.uri)  # else MLflow's own retries: minutes, each with a warning
                    self._client.log_batch(self.run_id, metrics=[Metric(*row) for row in rows], synchronous=True)
                except store_errors() as error:
                    with self._buffer:
                        self._pending.appendleft(rows)
                        self._count(len(rows))
                    if not self._failing:
                        logger.warning(
                            "metrics cannot be sent to %s and are kept: %s", redact_credentials(self.uri), brief(error)
                        )
                    self._failing = True
                    return
                self._failing = False

    def remember(self, names: Sequence[str], *, otherwise: Collection[int] = ()) -> None:
        """What holds one of these metrics at a step where the store has it is not sent again: a run that goes on does
        some steps once more, to the same numbers. `otherwise`: the steps to take for sent if the store does not say."""
        if self._client is None or self.run_id is None:
            return
        try:
            check_reachable(self.uri)
            for name in names:
                self._sent[name] = {found.step for found in self._client.get_metric_history(self.run_id, name)}
        except store_errors() as error:
            logger.warning("what %s has of the run could not be read: %s", redact_credentials(self.uri), brief(error))
            self._sent = {name: set(otherwise) for name in names}

    def log_text(self, text: str, name: str) -> None:
        """A text as an artifact."""
        if self._client is not None and self.run_id is not None:
            with self._or_warn(name):
                self._client.log_text(self.run_id, text, name)

    def log_artifacts(self, local_folder: Path, name: str) -> None:
        """The files of a folder as an artifact."""
        if self._client is not None and self.run_id is not None:
            with self._or_warn(name):
                self._client.log_artifacts(self.run_id, str(local_folder), name)

    def register(
        self, checkpoint: Path, base_model: str, metrics: Mapping[str, float | None], card: str
    ) -> RegisteredEditor | None:
        """A new version of the editor in the model registry."""
        if self._client is None or self.run_id is None:
            return None
        from malmen.platform.tracking.registry import register_editor, registered_name

        with clear_errors(self.uri):
            name = registered_name(self.config)
            return register_editor(self._client, self.run_id, name, checkpoint, base_model, metrics, card)

    def finish(self, status: Status = "FINISHED") -> None:
        """Send the rest and end the run; where the store is away, the watcher goes on trying to end it."""
        if self._client is None or self.run_id is None or self._ended.is_set():
            return
        self._ended.set()
        last_line: str = ENDED
        try:
            self._writer.join(2 * PATIENCE)
            if self._writer.is_alive():  # inside MLflow's own retries, which take minutes
                raise TimeoutError("the store does not answer")
            check_reachable(self.uri)
            self.flush()
            end_run(self._client, self.run_id, self.driver, status)
        except store_errors() as error:
            logger.warning(
                "the run could not be ended as %s in %s: %s", status, redact_credentials(self.uri), brief(error)
            )
            last_line = status
        if self._pending:
            logger.warning("%d metrics were never sent to %s", self._waiting, redact_credentials(self.uri))
        if self._watcher is not None:
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

    def _write(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            self.flush()

    def _take(self) -> _Row:
        """As much as one call may hold. What was logged together is sent together, so that the store has all of it or
        nothing, unless it is more than that."""
        with self._buffer:
            taken: _Row = []
            while self._pending and len(taken) + len(self._pending[0]) <= METRICS_PER_CALL:
                taken += self._pending.popleft()
            if not taken and self._pending:
                taken, self._pending[0] = self._pending[0][:METRICS_PER_CALL], self._pending[0][METRICS_PER_CALL:]
            self._waiting -= len(taken)
        return taken

    def _count(self, more: int) -> None:
        """So many more wait; of too many the oldest go."""
        self._waiting += more
        while self._waiting > MOST_PENDING and len(self._pending) > 1:
            self._waiting -= len(self._pending.popleft())

    @contextmanager
    def _or_warn(self, name: str) -> Iterator[None]:
        try:
            check_reachable(self.uri)
            yield
        except store_errors() as error:
            logger.warning("%s could not be written to %s: %s", name, redact_credentials(self.uri), brief(error))

    def _describe(self, tags: Mapping[str, str]) -> None:
        """The config as params and as a file. MLflow's params never change: a resumed run's changes become tags."""
        from mlflow.entities import Param, RunTag

        assert self._client is not None and self.run_id is not None
        config = json.loads(redact_credentials(self.config.model_dump_json()))
        params = {safe_name(key): value[:PARAM_LENGTH] for key, value in _flat(config)}
        before = self._client.get_run(self.run_id).data.params
        changed = {f"resumed.{key}": value for key, value in params.items() if before.get(key, value) != value}
        fresh = [Param(key, value) for key, value in params.items() if key not in before]
        for first in range(0, len(fresh), PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=fresh[first : first + PARAMS_PER_CALL], synchronous=True)
        described = [RunTag(key, str(value)) for key, value in {**tags, **changed}.items()]
        self._client.log_batch(self.run_id, tags=described, synchronous=True)
        self._client.log_text(self.run_id, json.dumps(config, indent=1, ensure_ascii=False) + "\n", "config.json")


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
        watcher.communicate(f"{last_line}\n".encode(), timeout=PATIENCE if last_line == ENDED else 0.1)
    except subprocess.TimeoutExpired:
        logger.debug("the watcher %d is still busy", watcher.pid)


def _versions() -> dict[str, str]:
    found = {"version.malmen": malmen.__version__, "version.python": sys.version.split()[0]}
    for name in ("torch", "transformers", "ray", "deepspeed", "mlflow"):
        try:
            found[f"version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)

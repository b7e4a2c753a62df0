"""Connecting to an MLflow store: within seconds, with one clear message if it cannot be reached."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from malmen.errors import EditError

if TYPE_CHECKING:
    from mlflow import MlflowClient

ANSWER_SECONDS = 5.0  # for a store to answer at all
_PORTS = {"sqlite": 0, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


def connect(uri: str, create: bool = True) -> MlflowClient:
    """A client of the store at `uri`. The fluent API is not used: one process may have several trackers."""
    file = _sqlite_file(uri)
    if not create and file is not None and not file.exists():
        raise EditError(f"no MLflow store at {uri}: {file} not found; give MLFLOW_TRACKING_URI=… of another one")
    check_reachable(uri)
    from mlflow import MlflowClient

    logging.getLogger("mlflow.store").setLevel(logging.WARNING)  # it announces tables and waits
    return MlflowClient(tracking_uri=uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or uri)


def absolute(uri: str) -> str:
    """The same store for a process with another working directory."""
    file = _sqlite_file(uri)
    return uri if file is None else re.sub(r"^(sqlite(?:\+\w+)?:///)[^?]+", lambda match: f"{match[1]}{file}", uri)


def check_reachable(uri: str) -> None:
    """Fail within seconds where MLflow would retry for minutes."""
    scheme = re.split(r"[+:]", uri)[0]
    if scheme in ("http", "https"):
        import requests

        insecure = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1")
        verify = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or not insecure
        answer = requests.get(f"{uri.rstrip('/')}/health", timeout=ANSWER_SECONDS, verify=verify)
        if answer.status_code >= 500:
            answer.raise_for_status()
    elif scheme in _PORTS:
        import sqlalchemy

        url = sqlalchemy.make_url(uri)
        if url.host:
            socket.create_connection((url.host, url.port or _PORTS[scheme]), ANSWER_SECONDS).close()
        elif file := _sqlite_file(uri):
            file.parent.mkdir(parents=True, exist_ok=True)
        sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool).connect().close()


def store_errors() -> tuple[type[Exception], ...]:
    """What a store may raise: a refusal, a broken database, no connection, a missing driver."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError, ImportError


@contextmanager
def clear_errors(uri: str) -> Iterator[None]:
    """Turn whatever a store raises into one EditError."""
    try:
        yield
    except store_errors() as error:
        raise EditError(
            f"MLflow cannot be used at {redact_credentials(uri)}: {brief(error)}; "
            "give another tracking.uri, or tracking.enabled=false"
        ) from error


def redact_credentials(text: str) -> str:
    """Replace the passwords of all addresses in a text by ***."""
    return re.sub(r"(://[^:/@\s\"]*):[^@/\s\"]+@", r"\1:***@", text)


def safe_name(name: str) -> str:
    """A name that MLflow accepts for a metric, param or tag."""
    return re.sub(r"[^\w.:/ -]", "_", name, flags=re.ASCII)[:250]


def brief(error: Exception) -> str:
    """An error in one line, without SQL and passwords."""
    return redact_credentials(" ".join(str(error).split("\n[SQL")[0].split())[:300] or type(error).__name__)


def find_experiment(client: MlflowClient, name: str, uri: str) -> str:
    """The id of an experiment; creates it if it does not exist. A sqlite store has its artifacts beside the file."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        file = _sqlite_file(uri)
        try:
            return client.create_experiment(name, artifact_location=str(file.parent / "mlartifacts") if file else None)
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # another process may have been quicker
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise EditError(
            f"the experiment {name!r} is deleted in {redact_credentials(uri)}; restore it, or give tracking.experiment"
        )
    return str(experiment.experiment_id)


def _sqlite_file(uri: str) -> Path | None:
    match = re.match(r"sqlite(?:\+\w+)?:///([^?]+)", uri)
    return Path(match[1]).resolve() if match and match[1] != ":memory:" else None

"""Where a run's files are: checks that they outlast its processes and that all nodes see them."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from malmen.config import Config
from malmen.errors import EditError, UsageError
from malmen.platform.tracking.store import absolute, redact_credentials
from malmen.runs.storage import CHECKPOINT_PREFIX, RunStore

VISIBLE_SECONDS = 90.0  # until all nodes see a new checkpoint: NFS may cache a folder for a minute


def in_ray_job() -> bool:
    """Whether this is the driver of a Ray job; its workers have the same copy of the working directory."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def check_lasting(config: Config, out: str | Path) -> None:
    """UsageError if the run's files would be in a Ray job's copy of the working directory, which ends with the job."""
    location = RunStore(out).location
    if isinstance(location, Path) and not location.is_absolute():
        raise UsageError(
            f"--out {out} would be in the Ray job's temporary copy of the working directory: give an absolute path"
        )
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    lost = uri is None and not isinstance(location, Path)
    if config.tracking.enabled and (lost or (uri is not None and absolute(uri) != uri)):
        raise UsageError(
            f"MLflow's store would be in the Ray job's temporary copy of the working directory (--out {out}, "
            f"tracking.uri {uri and redact_credentials(uri)}): give tracking.uri=http://… or "
            "sqlite:////absolute/path/mlflow.db, or tracking.enabled=false"
        )


def check_shared(store: RunStore, step: int) -> None:
    """EditError unless this node sees the checkpoint of a step, or a later one; an actor on any node wrote it."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not any(_step(name) >= step for name in store.checkpoints()):
        if time.monotonic() > deadline:
            raise EditError(
                f"the checkpoint of step {step} was written to {store.location}, but node {socket.gethostname()} does "
                "not see it there: --out must be a folder that all nodes share, or a URL such as s3://bucket/run"
            )
        time.sleep(min(0.5, VISIBLE_SECONDS))


def _step(checkpoint: str) -> int:
    return int(checkpoint.removeprefix(CHECKPOINT_PREFIX).partition(".")[0])

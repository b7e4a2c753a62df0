"""Where a run's things lie, so that they are still there when its processes are gone."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

from malmen.config import Config
from malmen.errors import EditError, UsageError
from malmen.platform.tracking.store import absolute, redact_credentials
from malmen.runs.storage import CHECKPOINT_PREFIX, RunStore

PATIENCE = 90.0  # seconds: NFS may keep what it knew of a folder for a minute


def in_ray_job() -> bool:
    """Whether this is the driver of a Ray job; its workers have the same copy of the working directory."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def check_lasting(config: Config, out: str | Path) -> None:
    """What lies in a Ray job's copy of the working directory is gone with the job."""
    place = RunStore(out).location
    if isinstance(place, Path) and not place.is_absolute():
        raise UsageError(
            f"--out {out} would lie in the Ray job's temporary copy of the working directory: give a whole path"
        )
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    lost = uri is None and not isinstance(place, Path)
    if config.tracking.enabled and (lost or (uri is not None and absolute(uri) != uri)):
        raise UsageError(
            f"MLflow's store would lie in the Ray job's temporary copy of the working directory (--out {out}, "
            f"tracking.uri {uri and redact_credentials(uri)}): give tracking.uri=http://… or "
            "sqlite:////whole/path/mlflow.db, or tracking.enabled=false"
        )


def check_shared(store: RunStore, step: int) -> None:
    """EditError unless this node sees the checkpoint of a step, or a later one: an actor, maybe elsewhere, wrote it."""
    deadline = time.monotonic() + PATIENCE
    while not any(_step(name) >= step for name in store.checkpoints()):
        if time.monotonic() > deadline:
            raise EditError(
                f"the checkpoint of step {step} was written to {store.location}, but node {socket.gethostname()} does "
                "not see it there: --out must be a folder that all nodes share, or a URL such as s3://bucket/run"
            )
        time.sleep(min(0.5, PATIENCE))


def _step(checkpoint: str) -> int:
    return int(checkpoint.removeprefix(CHECKPOINT_PREFIX).partition(".")[0])


def ray_train_folder(run: str) -> str:
    """For Ray Train's notes, which hold no checkpoint: a disk will do where its storage does not know the URL."""
    store = RunStore(run)
    return str(
        store.join(".ray_train") if store.is_local else Path(tempfile.gettempdir()) / f"malmen-ray-train-{os.getuid()}"
    )

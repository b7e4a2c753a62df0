"""Ends the MLflow run of a driver that died.

    MLFLOW_TRACKING_URI=… python -m malmen.platform.tracking.watcher RUN_ID DRIVER

A driver that gets SIGKILL can do nothing any more, and MLflow has no timeout for runs, so another process must watch.
It sleeps on a pipe from the driver and imports nothing heavy before it is needed. The store's address comes through the
environment: it may hold a password, and all users can read a command line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

ENDED = "ended"  # the driver's last line when nothing is left to do
DRIVER_TAG = "malmen.driver"  # the driver that a run belongs to; a resumed run has another one


def start_watcher(uri: str, run_id: str, driver: str) -> subprocess.Popen[bytes]:
    """By the driver; its last line goes to the watcher's standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", "malmen.platform.tracking.watcher", run_id, driver],
        env={**os.environ, "MLFLOW_TRACKING_URI": uri},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what kills the driver's group, Ctrl-C for one, leaves it alive
    )


def main() -> None:
    """Wait for the driver's last line: ENDED, or the status to set. Its end without one means that it was killed."""
    run_id, driver = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork():  # no child of the driver: `ray job stop` kills all its descendants
        os._exit(0)
    status = sys.stdin.readline().strip() or "KILLED"
    if status != ENDED:
        from mlflow import MlflowClient

        end_run(MlflowClient(), run_id, driver, status)


def end_run(client: MlflowClient, run_id: str, driver: str, status: str) -> None:
    """Set the status of a run, unless it has ended or belongs to another driver by now."""
    run = client.get_run(run_id)
    if run.info.status == "RUNNING" and run.data.tags.get(DRIVER_TAG) == driver:
        client.set_terminated(run_id, status)


if __name__ == "__main__":
    main()

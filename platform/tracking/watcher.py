"""Ends the MLflow run of a driver that died.

    MLFLOW_TRACKING_URI=… python -m malmen.platform.tracking.watcher RUN_ID DRIVER

It sleeps on a pipe from the driver and imports nothing heavy before it is needed. The store's address comes through
the environment, because it may hold a password and everyone can read a command line.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

ENDED = "ended"  # the driver's last line when there is nothing left to do
DRIVER_TAG = "malmen.driver"  # which driver a run belongs to now: a resumed run has another one


def main() -> None:
    """Wait for the driver's last line; its end without one means that it was killed."""
    run_id, driver = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork():  # nobody's child: `ray job stop` kills all that descend from the driver, at once
        os._exit(0)
    said = sys.stdin.readline().strip()
    if said != ENDED:
        from mlflow import MlflowClient

        client = MlflowClient()
        if client.get_run(run_id).info.status == "RUNNING":
            end_run(client, run_id, driver, said or "KILLED")


def end_run(client: MlflowClient, run_id: str, driver: str, status: str) -> None:
    """Set the status of a run that is still this driver's."""
    if client.get_run(run_id).data.tags.get(DRIVER_TAG) == driver:
        client.set_terminated(run_id, status)


if __name__ == "__main__":
    main()

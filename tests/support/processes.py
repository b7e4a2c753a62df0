"""The processes of the tests' Ray cluster, and waiting for something to become of them."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import ray

ROLES = ("HypernetActor", "RayTrainWorker", "Board", "SweepTrial", "UnsoundTrial")


def role_processes() -> list[psutil.Process]:
    """Who works for a run or a sweep; Ray's own agents, and those that Ray Train lets linger, are not ours."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, IndexError):
            if process.cmdline()[0].startswith(tuple(f"ray::{role}" for role in ROLES)):
                found.append(process)
    return found


def wait_until_nobody_works(seconds: float = 60) -> None:
    """Until no role of any run is there; if one stays, it is named."""
    end = time.monotonic() + seconds
    while left := role_processes():
        assert time.monotonic() < end, [(process.pid, process.name()) for process in left]
        gc.collect()  # an actor lives as long as a handle of it in this process does
        time.sleep(0.1)  # between two looks


def start_driver(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """A driver on the tests' cluster in a process of its own, in `folder`."""
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
    with (folder / "driver.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def wait_until(
    condition: Callable[[], bool], what: str, seconds: float = 60, driver: subprocess.Popen[bytes] | None = None
) -> None:
    """Until it holds, for a bounded time, and no longer than its driver lives."""
    end = time.monotonic() + seconds
    while not condition():
        assert driver is None or driver.poll() is None, f"the driver has ended before {what}"
        assert time.monotonic() < end, f"{what} was not there within {seconds} s"
        time.sleep(0.05)  # between two looks; the condition decides

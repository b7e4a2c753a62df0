"""Start the endpoint on the Ray that this process is connected to, and see that it comes up."""

from __future__ import annotations

import threading
import time
from typing import Any

from ray import serve
from ray.serve.schema import ApplicationStatus

from malmen.errors import EditError, RunStopped
from malmen.serve.app import make_application
from malmen.serve.settings import ServeConfig

NAME = "malmen"
PATIENCE = 600.0  # seconds for large models to load


def run_endpoint(
    settings: ServeConfig, host: str, port: int, stopped: threading.Event, patience: float = PATIENCE
) -> str:
    """Deploy and wait until all roles run; gives the address. What keeps one from starting is told."""
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
    target = serve.RunTarget(make_application(settings), name=NAME, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)  # we wait ourselves, with an end to it
    ends = time.monotonic() + patience
    while (state := _state()) != ApplicationStatus.RUNNING:
        if state == ApplicationStatus.DEPLOY_FAILED:
            raise EditError(f"the endpoint did not come up: {_reason()}")
        if time.monotonic() > ends:
            raise EditError(f"the endpoint is not up after {patience:.0f} s: {_reason() or state}")
        if stopped.wait(0.2):
            raise RunStopped("stopped before the endpoint was up")
    return f"http://{host}:{port}"


def stop_endpoint() -> None:
    """Take the endpoint down; the store keeps everything."""
    serve.shutdown()


def _state() -> Any:
    found = serve.status().applications.get(NAME)
    return found.status if found else None


def _reason() -> str:
    """The last line of what went wrong in a replica, which says most."""
    found = serve.status().applications.get(NAME)
    messages = [one.message for one in found.deployments.values() if one.message] if found else []
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Problem" in line]
    return (telling or lines or [""])[-1]

"""Start the endpoint on the Ray cluster that this process is connected to, and stop it."""

from __future__ import annotations

import threading
import time

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from malmen.errors import EditError, RunStopped
from malmen.serve.app import make_application
from malmen.serve.settings import ServeConfig

APPLICATION = "malmen"
START_SECONDS = 600.0  # large models take long to load


def start_endpoint(settings: ServeConfig, host: str, port: int, stopped: threading.Event) -> str:
    """Deploy, wait until all deployments run, and return the address; EditError says why one does not start."""
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
    target = serve.RunTarget(make_application(settings), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)  # Ray would wait without end
    ends = time.monotonic() + START_SECONDS
    while (application := serve.status().applications.get(APPLICATION)) is None or (
        application.status != ApplicationStatus.RUNNING
    ):
        if application and application.status == ApplicationStatus.DEPLOY_FAILED:
            raise EditError(f"the endpoint did not start: {_reason(application)}")
        if time.monotonic() > ends:
            reason = application and (_reason(application) or application.status)
            raise EditError(f"the endpoint has not started after {START_SECONDS:.0f} s: {reason}")
        if stopped.wait(0.2):
            raise RunStopped("stopped before the endpoint had started")
    return f"http://{host}:{port}"


def stop_endpoint() -> None:
    """Stop the endpoint; the store keeps everything."""
    serve.shutdown()


def _reason(application: ApplicationStatusOverview) -> str:
    """The last line that names an error in a replica, else the last line."""
    messages = [deployment.message for deployment in application.deployments.values()]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Problem" in line]
    return (errors or lines or [""])[-1]

"""The endpoint on Ray Serve: an ingress, exactly one writer, and readers that scale with the load; how they start.

Only the writer and the readers need torch and the model: they import them when they start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusTrigger,
    ReplicaState,
)

from malmen.config import SPLIT
from malmen.errors import EditError, RunStopped, UsageError
from malmen.serve.http.access import VARIABLE, load_access
from malmen.serve.http.api import Backend, make_app
from malmen.serve.ledger.opening import open_ledger, pin_editor
from malmen.serve.messages import (
    AnswerState,
    Change,
    CountVersions,
    Outcome,
    Prompt,
    ReaderRequest,
    Reply,
    WorkerStatus,
    WriterRequest,
    reply_or_raise,
)
from malmen.serve.problems import Problem
from malmen.serve.settings import ReaderConfig, ServeConfig, WriterConfig, parse_settings

log = logging.getLogger(__name__)
APPLICATION = "malmen"
START_SECONDS = 600.0  # large models take long to load
REPLACEMENT_SECONDS = 60.0  # that a request waits while Ray replaces a lost writer or reader
REPLY_SECONDS = 600.0  # for one reply; longer work is a job
STATUS_SECONDS = 2.0  # for a reader to tell how many versions it holds
_LOST = (RayServeException, RayError)


@serve.deployment(num_replicas=1, max_ongoing_requests=1000, health_check_period_s=2)
class WriterDeployment:
    """The one writer. Changes that arrive while it solves are merged into the next solve."""

    def __init__(self, settings: ServeConfig) -> None:
        from malmen.serve.assembly import build_service
        from malmen.serve.writing.writer import Writer

        self.writer = Writer(build_service(settings), settings, self._apply)
        _set_batching(self._apply, settings.writer)

    async def ask(self, request: WriterRequest[Reply]) -> Reply | Problem:
        """The reply to a request, or the problem with it."""
        return await self.writer.ask(request)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.02)
    async def _apply(self, changes: list[Change]) -> list[Outcome]:
        return await asyncio.to_thread(self.writer.service.apply, changes)

    def check_health(self) -> None:
        """Ray calls this regularly, and replaces a writer that raises."""
        if not self.writer.jobs.alive():
            raise RuntimeError("the thread that works on jobs has died")


@serve.deployment(max_ongoing_requests=100, health_check_period_s=2)
class ReaderDeployment:
    """A reader. Prompts that arrive together are decoded together, whatever their versions."""

    def __init__(self, settings: ServeConfig) -> None:
        from malmen.serve.assembly import build_reader
        from malmen.serve.reading.reader import ReaderWorker

        self.worker = ReaderWorker(build_reader(settings), self._decode)
        _set_batching(self._decode, settings.reader)

    async def ask(self, request: ReaderRequest[Reply]) -> Reply | Problem:
        """The reply to a request, or the problem with it."""
        reply: Any = await self.worker.ask(request)
        if isinstance(reply, AnswerState):
            reply = replace(reply, reader=serve.get_replica_context().replica_tag)
        return reply

    async def stream(self, prompt: Prompt) -> AsyncIterator[AnswerState | Problem]:
        """The answer as it grows; a problem ends it."""
        async for state in self.worker.stream(prompt):
            yield state

    @cast(Any, serve.batch(max_batch_size=16, batch_wait_timeout_s=0.005))  # Ray's types know no generators
    async def _decode(self, prompts: list[Prompt]) -> AsyncIterator[list[AnswerState]]:
        async for states in self.worker.decode_batch(prompts):
            yield states


class RayWorkers:
    """The writer and the readers as the ingress reaches them: over Ray, which replaces one that dies."""

    def __init__(self, writer: DeploymentHandle, reader: DeploymentHandle) -> None:
        self.writer, self.reader = writer, reader

    async def ask_writer(self, request: WriterRequest[Reply]) -> Reply:
        return await _ask(self.writer, "the writer", request)

    async def ask_reader(self, request: ReaderRequest[Reply]) -> Reply:
        return await _ask(self.reader, "a reader", request)

    async def stream(self, prompt: Prompt) -> AsyncIterator[AnswerState]:
        try:
            async for state in cast(Any, self.reader.options(stream=True)).stream.remote(prompt):
                yield reply_or_raise(state)
        except _LOST as error:
            raise Problem(503, f"the reader was lost in the middle of an answer: {type(error).__name__}") from error

    async def status(self) -> WorkerStatus:
        try:
            status = await asyncio.to_thread(serve.status)
        except _LOST as error:
            raise Problem(503, f"Ray Serve's controller does not answer: {type(error).__name__}") from error
        replicas = {
            name: deployment.replica_states
            for application in status.applications.values()
            for name, deployment in application.deployments.items()
        }
        writers, readers = (replicas.get(name, {}) for name in ("WriterDeployment", "ReaderDeployment"))
        running, versions = readers.get(ReplicaState.RUNNING, 0), 0
        if running:
            try:
                versions = await asyncio.wait_for(self.ask_reader(CountVersions()), STATUS_SECONDS)
            except (Problem, TimeoutError):
                log.info("no reader tells how many versions it holds")
        return WorkerStatus(writers.get(ReplicaState.RUNNING, 0) > 0, sum(readers.values()), running, versions)


async def _ask(handle: DeploymentHandle, worker: str, request: WriterRequest[Reply] | ReaderRequest[Reply]) -> Reply:
    """The reply to a request, which is repeated, if it may be, while Ray replaces a worker that was lost."""
    ends = time.monotonic() + REPLACEMENT_SECONDS
    while True:
        try:
            outcome = await asyncio.wait_for(handle.ask.remote(request), REPLY_SECONDS)
            return cast(Reply, reply_or_raise(outcome))
        except TimeoutError as error:  # it may still be carried out: the same Idempotency-Key gives its result
            raise Problem(503, f"{worker} did not reply within {REPLY_SECONDS:.0f} s", retry_after=5) from error
        except BackPressureError as error:
            raise Problem(429, f"{worker} is overloaded", retry_after=2) from error
        except RayTaskError as error:  # it runs, and failed: it would fail again
            log.error("%s failed", worker, exc_info=error)
            raise Problem(503, f"{worker} failed: {type(error.cause).__name__}") from error
        except _LOST as error:
            if not request.repeatable or time.monotonic() > ends:
                raise Problem(503, f"{worker} is not available: {type(error).__name__}", retry_after=2) from error
        await asyncio.sleep(0.2)


def _set_batching(method: Any, settings: WriterConfig | ReaderConfig) -> None:
    """Replace what the decorator `serve.batch` was given."""
    method.set_max_batch_size(settings.batch)
    method.set_batch_wait_timeout_s(settings.wait_seconds)


def _app() -> FastAPI:
    """Built in the replica: an application that is pickled loses its annotations."""
    return make_app(lambda: cast(Any, serve.get_replica_context().servable_object).backend)


@serve.deployment(max_ongoing_requests=1000, health_check_period_s=2)
@serve.ingress(_app)
class Ingress:
    """Answers HTTP requests."""

    def __init__(
        self, settings: ServeConfig, writer: DeploymentHandle, reader: DeploymentHandle, tokens: str | None
    ) -> None:
        access = load_access(settings.tokens_file, tokens)
        self.backend = Backend(settings, open_ledger(settings), access, RayWorkers(writer, reader))


def make_application(settings: ServeConfig) -> serve.Application:
    """The deployments, bound to each other."""
    readers = settings.reader
    scale = {
        "min_replicas": readers.min_replicas,
        "max_replicas": max(readers.min_replicas, readers.max_replicas),
        "target_ongoing_requests": readers.target_requests,
    }
    deployments = cast(Any, (WriterDeployment, ReaderDeployment, Ingress))
    writer = deployments[0].options(ray_actor_options=_resources(settings.writer, "writer"))
    reader = deployments[1].options(autoscaling_config=scale, ray_actor_options=_resources(readers, "reader"))
    ingress = deployments[2].options(num_replicas=settings.ingress_replicas, ray_actor_options={"num_cpus": 0.1})
    # Not as a variable of its environment, which Ray shows to everyone with access to the cluster.
    tokens = os.environ.get(VARIABLE)
    bound: serve.Application = ingress.bind(settings, writer.bind(settings), reader.bind(settings), tokens)
    return bound


def build(raw: dict[str, Any]) -> serve.Application:
    """The application for `serve deploy`: `import_path: malmen.serve.app:build`, with the settings as its args."""
    return make_application(pin_editor(parse_settings(raw, "args")))


def _resources(settings: WriterConfig | ReaderConfig, name: str) -> dict[str, Any]:
    """Ray's resources for a process. The default on a GPU is half of it: one GPU holds a writer and a reader."""
    gpus = settings.gpus
    if gpus is None:
        if settings.device == SPLIT:
            raise UsageError(f"{name}.device is `split`, which needs a number of GPUs: set {name}.gpus")
        gpus = 0.5 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    return {"num_cpus": settings.cpus, "num_gpus": gpus}


def start_endpoint(settings: ServeConfig, host: str, port: int, stopped: threading.Event) -> str:
    """Deploy, wait until all deployments run, and return the address; EditError says why one does not start."""
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
    target = serve.RunTarget(make_application(settings), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)  # Ray would wait without end
    ends = time.monotonic() + START_SECONDS
    while (application := serve.status().applications.get(APPLICATION)) is None or (
        application.status != ApplicationStatus.RUNNING
    ):
        if application and has_failed(application):
            raise EditError(f"the endpoint did not start: {_reason(application)}")
        if time.monotonic() > ends:
            reason = application and (_reason(application) or application.status)
            raise EditError(f"the endpoint has not started after {START_SECONDS:.0f} s: {reason}")
        if stopped.wait(0.2):
            raise RunStopped("stopped before the endpoint had started")
    return f"http://{host}:{port}"


def has_failed(application: ApplicationStatusOverview) -> bool:
    """Whether a start has come to its end. A replica that was lost meanwhile is no end: Serve starts another."""
    failed = [one for one in application.deployments.values() if one.status == DeploymentStatus.DEPLOY_FAILED]
    only_lost = bool(failed) and all(
        one.status_trigger == DeploymentStatusTrigger.HEALTH_CHECK_FAILED for one in failed
    )
    return application.status == ApplicationStatus.DEPLOY_FAILED and not only_lost


def _reason(application: ApplicationStatusOverview) -> str:
    """The last line that names an error in a replica, else the last line."""
    messages = [deployment.message for deployment in application.deployments.values()]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Problem" in line]
    return (errors or lines or [""])[-1]

"""The roles as Ray Serve deployments: an ingress, exactly one writer, and readers that scale by load.

Only the writer and the readers need torch and the model: they import them when they start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ReplicaState

from malmen.config import SPLIT
from malmen.data.records import EditRecord
from malmen.errors import UsageError
from malmen.serve.http.access import VARIABLE, load_access
from malmen.serve.http.api import Backend, make_app
from malmen.serve.http.problems import Problem
from malmen.serve.ledger.editor_copy import keep_editor
from malmen.serve.ledger.opening import open_ledger
from malmen.serve.messages import Change, Outcome, Prompt, unwrapped
from malmen.serve.reading.streams import Growing
from malmen.serve.settings import ReaderConfig, ServeConfig, WriterConfig, parse_settings

if TYPE_CHECKING:
    from malmen.export import ExportKind

log = logging.getLogger(__name__)
PATIENCE = 60.0  # seconds that an ingress waits for a writer or reader that is being replaced
LONGEST = 600.0  # seconds for one reply; what takes longer is a job
_LOST = (RayActorError, DeploymentUnavailableError, RayServeException, RayError)


@serve.deployment(num_replicas=1, max_ongoing_requests=1000, health_check_period_s=2)
class WriterDeployment:
    """The one writer: what arrives while it solves is merged into the next solve."""

    def __init__(self, raw: dict[str, Any]) -> None:
        from malmen.serve.workers import Writer

        self.settings = parse_settings(raw, "the endpoint's settings")
        self.writer = Writer(self.settings)
        _set_batching(self._merged, self.settings.writer.batch, self.settings.writer.wait_seconds)

    async def edit(self, change: Change) -> Outcome:
        """Make a change, together with the others that are asked for at the same time."""
        return await self._merged(change)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.02)
    async def _merged(self, changes: list[Change]) -> list[Outcome]:
        return await asyncio.to_thread(self.writer.apply, changes)

    async def wake(self) -> None:
        """There is a job."""
        self.writer.jobs.wake()

    def check_health(self) -> None:
        """Ray asks now and then, and replaces a writer that says no."""
        if not self.writer.jobs.alive():
            raise RuntimeError("the thread that works on jobs has died")

    async def export(self, version: str, kind: ExportKind, max_rank: int) -> Outcome:
        """Write a version's files."""
        return await asyncio.to_thread(self.writer.export, version, kind, max_rank)


@serve.deployment(max_ongoing_requests=100, health_check_period_s=2)
class ReaderDeployment:
    """A reader: prompts that arrive together are decoded together, whatever their versions."""

    def __init__(self, raw: dict[str, Any]) -> None:
        from malmen.serve.materials import make_reader
        from malmen.serve.workers import Answering

        settings = parse_settings(raw, "the endpoint's settings")
        self.answering = Answering(make_reader(settings))
        _set_batching(self._merged, settings.reader.batch, settings.reader.wait_seconds)

    async def complete(self, prompt: Prompt) -> Outcome:
        """The whole answer."""
        try:
            return {**await self._begin(prompt).end(), "reader": serve.get_replica_context().replica_tag}
        except Problem as problem:
            return problem

    async def stream(self, prompt: Prompt) -> AsyncIterator[Outcome]:
        """The answer as it grows."""
        try:
            async for state in self._begin(prompt).states():
                yield state
        except Problem as problem:
            yield problem

    async def chat_text(self, turns: list[dict[str, str]]) -> Outcome:
        """A chat as the model reads it, or why it does not."""
        return self.answering.chat_text(turns)

    async def evaluate(self, records: Sequence[EditRecord], shifts: str | None, generate: bool) -> Outcome:
        """Measure a version."""
        return await asyncio.to_thread(self.answering.evaluate, records, shifts, generate)

    async def memory(self) -> dict[str, int]:
        """Versions held, and their bytes."""
        return self.answering.reader.memory()

    def _begin(self, prompt: Prompt) -> Growing:
        """Queue a prompt; what is wrong with it is told before it is decoded with others."""
        self.answering.reader.encode(prompt)
        growing = Growing()
        growing.filled_by(asyncio.ensure_future(self._merged((prompt, growing))))
        return growing

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.005)
    async def _merged(self, asked: list[tuple[Prompt, Growing]]) -> list[None]:
        await asyncio.to_thread(self.answering.answer, asked)
        return [None] * len(asked)


class ServeRoles:
    """The other deployments, asked over Ray; one that dies is waited for while Ray brings it back."""

    def __init__(self, writer: DeploymentHandle, reader: DeploymentHandle) -> None:
        self.writer, self.reader = writer, reader

    async def edit(self, change: Change) -> dict[str, Any]:
        """Asked again if the writer dies: the change's key keeps it from being done twice."""
        asking = lambda: self.writer.edit.remote(change)  # noqa: E731
        return unwrapped(await (_patiently(asking, "the writer") if change.key else _once(asking, "the writer")))

    async def wake(self) -> None:
        try:
            await _once(lambda: self.writer.wake.remote(), "the writer")
        except Problem as problem:  # the job is recorded: the next writer finds it
            log.warning("a job waits: %s", problem.detail)

    async def export(self, version: str, kind: ExportKind, max_rank: int) -> dict[str, Any]:
        return unwrapped(await _once(lambda: self.writer.export.remote(version, kind, max_rank), "the writer"))

    async def complete(self, prompt: Prompt) -> dict[str, Any]:
        return unwrapped(await _patiently(lambda: self.reader.complete.remote(prompt), "a reader"))

    async def stream(self, prompt: Prompt) -> AsyncIterator[dict[str, Any]]:
        try:
            states = cast(Any, self.reader.options(stream=True)).stream.remote(prompt)
            async for state in states:
                yield unwrapped(state)
        except _LOST as error:
            raise Problem(503, f"the reader was lost in the middle of an answer: {type(error).__name__}") from error

    async def chat_text(self, turns: list[dict[str, str]]) -> dict[str, Any]:
        return unwrapped(await _patiently(lambda: self.reader.chat_text.remote(turns), "a reader"))

    async def evaluate(self, records: Sequence[EditRecord], shifts: str | None, generate: bool) -> dict[str, Any]:
        return unwrapped(await _patiently(lambda: self.reader.evaluate.remote(records, shifts, generate), "a reader"))

    async def status(self) -> dict[str, Any]:
        try:
            found = await asyncio.to_thread(serve.status)
        except _LOST as error:
            raise Problem(503, f"Ray Serve's controller does not answer: {type(error).__name__}") from error
        states = {
            name: (sum(one.replica_states.values()), one.replica_states.get(ReplicaState.RUNNING, 0))
            for app in found.applications.values()
            for name, one in app.deployments.items()
        }
        total, running = states.get("ReaderDeployment", (0, 0))
        memory = {"versions": 0}
        if running:
            try:
                memory = await asyncio.wait_for(_once(lambda: self.reader.memory.remote(), "a reader"), 2)
            except (Problem, TimeoutError):
                log.info("no reader says how many versions it holds")
        return {
            "writer": {"alive": states.get("WriterDeployment", (0, 0))[1] > 0},
            "readers": {"replicas": total, "running": running},
            "versions_in_memory": memory["versions"],
        }


async def _once(ask: Callable[[], Awaitable[Any]], whom: str) -> Any:
    try:
        return await asyncio.wait_for(ask(), LONGEST)
    except TimeoutError as error:  # it may still be done: the same Idempotency-Key asks for its result
        raise Problem(503, f"{whom} did not reply within {LONGEST:.0f} s", final=True, retry_after=5) from error
    except BackPressureError as error:
        raise Problem(429, f"{whom} has too much to do", retry_after=2) from error
    except RayTaskError as error:  # it is there, and failed: asking again would fail again
        log.error("%s failed", whom, exc_info=error)
        raise Problem(503, f"{whom} failed: {type(error.cause).__name__}", final=True) from error
    except _LOST as error:
        raise Problem(503, f"{whom} is not there: {type(error).__name__}", retry_after=2) from error


async def _patiently(ask: Callable[[], Awaitable[Any]], whom: str) -> Any:
    """Ask again while Ray replaces who was lost, for a bounded time."""
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            return await _once(ask, whom)
        except Problem as problem:
            if problem.status != 503 or "final" in problem.more or time.monotonic() > ends:
                raise
        await asyncio.sleep(0.2)


def _backend() -> Backend:
    found: Backend = cast(Any, serve.get_replica_context().servable_object).backend
    return found


def _set_batching(method: Any, size: int, wait: float) -> None:
    """What `serve.batch` was given when the class was written is replaced by the settings."""
    method.set_max_batch_size(size)
    method.set_batch_wait_timeout_s(wait)


def _app() -> FastAPI:
    """Made in the replica: an application that travels there forgets what its annotations mean."""
    return make_app(_backend)


@serve.deployment(max_ongoing_requests=1000, health_check_period_s=2)
@serve.ingress(_app)
class Ingress:
    """HTTP: who asks, what, and whether they may."""

    def __init__(
        self, raw: dict[str, Any], writer: DeploymentHandle, reader: DeploymentHandle, tokens: str | None
    ) -> None:
        settings = parse_settings(raw, "the endpoint's settings")
        access = load_access(tokens_file(settings), tokens)
        self.backend = Backend(settings, open_ledger(settings), access, ServeRoles(writer, reader))


def tokens_file(settings: ServeConfig) -> Path:
    """Where the tokens are kept."""
    return Path(settings.tokens) if settings.tokens else Path(settings.store) / "tokens.yaml"


def make_application(settings: ServeConfig) -> serve.Application:
    """The deployments, bound to each other."""
    raw = settings.model_dump(mode="json")
    readers = settings.reader
    scale = {
        "min_replicas": readers.min_replicas,
        "max_replicas": max(readers.min_replicas, readers.max_replicas),
        "target_ongoing_requests": readers.target_requests,
    }
    writers, answerers, ingresses = cast(Any, (WriterDeployment, ReaderDeployment, Ingress))
    writer = writers.options(ray_actor_options=_resources(settings.writer, "writer"))
    reader = answerers.options(autoscaling_config=scale, ray_actor_options=_resources(readers, "reader"))
    ingress = ingresses.options(num_replicas=settings.ingress_replicas, ray_actor_options={"num_cpus": 0.1})
    # Not as a variable of its environment, which Ray shows to everybody who may look at the cluster.
    tokens = os.environ.get(VARIABLE)
    bound: serve.Application = ingress.bind(raw, writer.bind(raw), reader.bind(raw), tokens)
    return bound


def build(raw: dict[str, Any]) -> serve.Application:
    """For `serve deploy`: `import_path: malmen.serve.app:build`, the settings as its args."""
    return make_application(keep_editor(parse_settings(raw, "args")))


def _resources(role: WriterConfig | ReaderConfig, name: str) -> dict[str, Any]:
    """Of Ray, for a process. Half a GPU where nothing is said and there are some: one holds a writer and a reader."""
    gpus = role.gpus
    if gpus is None:
        if role.device == SPLIT:
            raise UsageError(f"{name}.device is `split`: over how many GPUs? Set {name}.gpus")
        gpus = 0.5 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    return {"num_cpus": role.cpus, "num_gpus": gpus}

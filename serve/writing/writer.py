"""The writer's process: the service, its jobs and its exports, behind one method that takes every request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from malmen.errors import EditError
from malmen.serve.messages import Change, Export, Outcome, Reply, WakeJobs, WriterRequest
from malmen.serve.problems import Problem
from malmen.serve.settings import ServeConfig
from malmen.serve.writing.exports import export_version
from malmen.serve.writing.job_runner import JobRunner
from malmen.serve.writing.service import EditService


class Writer:
    """Answers the requests to the writer."""

    def __init__(
        self, service: EditService, settings: ServeConfig, apply: Callable[[Change], Awaitable[Outcome]]
    ) -> None:
        """`apply` carries out a change by `service.apply`, together with others that arrive at the same time."""
        self.service, self.settings, self._apply = service, settings, apply
        self.jobs = JobRunner(service)
        self.exporting = threading.Lock()

    async def ask(self, request: WriterRequest[Reply]) -> Reply | Problem:
        """The reply to a request, or the problem with it."""
        reply: Any = None
        match request:
            case Change():
                reply = await self._apply(request)
            case Export():
                reply = await asyncio.to_thread(self._export, request)
            case WakeJobs():
                self.jobs.wake()
        return reply

    def _export(self, request: Export) -> dict[str, Any] | Problem:
        """One at a time: an export may need gigabytes, two would write the same folder, and waiting blocks a thread."""
        if not self.exporting.acquire(blocking=False):
            return Problem(429, "another export is being written; try again later", retry_after=10)
        try:
            return export_version(self.service, request, self.settings)
        except EditError as error:
            return Problem.of(error, 503)
        finally:
            self.exporting.release()

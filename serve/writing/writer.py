"""The writer's process: the service, its jobs and its exports, behind one method that takes every request."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from malmen.errors import EditError
from malmen.export import export_edit
from malmen.serve.ledger.jobs import Job, JobBook
from malmen.serve.messages import Change, Export, Outcome, Reply, WakeJobs, WriterRequest
from malmen.serve.problems import Problem
from malmen.serve.settings import ServeConfig
from malmen.serve.writing.service import EditService

log = logging.getLogger(__name__)
_POLL_SECONDS = 5.0  # how long a job waits at most if its wake-up was lost


class JobRunner:
    """A thread that carries out jobs, one after the other; a restart resumes them."""

    def __init__(self, service: EditService) -> None:
        self.service, self.book = service, JobBook(service.ledger)
        self._wake, self._stop = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for a new job now."""
        self._wake.set()

    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop; the next writer starts an unfinished job again."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._stop:
            self._wake.clear()
            try:
                while not self._stop and (job := self.book.next()):
                    self._work(job)
            except (Problem, OSError) as error:  # the database or the store fails: try again later
                log.warning("jobs wait: %s", error)
            self._wake.wait(timeout=_POLL_SECONDS)

    def _work(self, job: Job) -> None:
        outcome = self._outcome(job)
        if not isinstance(outcome, Problem):
            self.book.mark(job.id, state="done", done=job.total, result=outcome.reply.model_dump(mode="json"))
        elif outcome.status == 503:  # not the request's fault
            self.book.mark(job.id, state="queued")
            raise outcome
        else:
            self.book.mark(job.id, state="failed", result=outcome.document())

    def _outcome(self, job: Job) -> Outcome:
        change = job.change()
        try:
            if job.state == "again":
                raise Problem(422, "the writer died twice while it worked on this job; send it in smaller parts")
            self.service.check(change)
            self.book.mark(job.id, state="again" if job.state == "running" else "running", done=0)
            rows = self.service.prepare(change.facts, lambda done: self._progress(job, done)) if change.facts else None
            return self.service.apply([replace(change, rows=rows)])[0]
        except EditError as error:
            return Problem.of(error, 422)

    def _progress(self, job: Job, done: int) -> None:
        if self._stop:
            raise Problem(503, "the writer is stopping")
        self.book.mark(job.id, done=done)


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


def export_version(service: EditService, request: Export, settings: ServeConfig) -> dict[str, Any]:
    """Write a version as a delta, a LoRA or a merged checkpoint, and return its manifest.

    Edits continue meanwhile: all that is read here is frozen (the model) or immutable (a version, its blob).
    """
    version = service.ledger.resolve(request.version)
    if version.shifts is None:
        raise Problem(422, f"version {version.id} is the unedited model: it has nothing to export")
    members = service.ledger.edits_by_id(sorted(service.ledger.members(version.id)))
    try:
        return export_edit(
            request.kind,
            settings.export_folder(version.id, request.kind),
            service.lm,
            service.blobs.get(version.shifts),
            facts=[{"id": edit.id, "prompt": edit.prompt, "answer": edit.answer} for edit in members],
            model_name=settings.model or service.editor.config.model.name,
            max_rank=request.max_rank,
            info={"version": version.id, "number": version.number, "at": version.at},
        )
    except EditError as error:
        raise Problem(422, str(error)) from error
    except OSError as error:
        raise Problem(503, f"the store cannot be written: {error.strerror or error}", retry_after=5) from error

"""Jobs are carried out one after the other in a thread of the writer's process; a restart resumes them."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from malmen.errors import EditError
from malmen.serve.ledger.jobs import Job, JobBook
from malmen.serve.messages import Outcome
from malmen.serve.problems import Problem
from malmen.serve.writing.service import EditService

log = logging.getLogger(__name__)
_POLL_SECONDS = 5.0  # how long a job waits at most if its wake-up was lost


class JobRunner:
    """A thread that carries out jobs."""

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

"""Large requests are done one after the other, in the writer's process; a restart goes on with them."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from malmen.errors import EditError
from malmen.serve.http.problems import Problem
from malmen.serve.ledger.chain import canonical
from malmen.serve.ledger.jobs import Job, JobBook
from malmen.serve.service import EditService

log = logging.getLogger(__name__)


class JobRunner:
    """Works on the jobs in a thread of the writer's process."""

    def __init__(self, service: EditService) -> None:
        self.service, self.book = service, JobBook(service.ledger)
        self._wake, self._stop = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is a new job."""
        self._wake.set()

    def alive(self) -> bool:
        """Whether jobs are worked on."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Work on no more jobs; the one at hand is begun again by the next writer."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._stop:
            self._wake.clear()
            try:
                while not self._stop and (job := self.book.next()):
                    self._work(job)
            except (Problem, OSError) as error:  # a database that is gone: it is asked again
                log.warning("jobs wait: %s", error)
            self._wake.wait(timeout=5)

    def _work(self, job: Job) -> None:
        change = job.change()
        try:
            if job.state == "again":
                raise Problem(422, "the writer died of this job twice; send it in smaller parts")
            self.service.check(change)
            self.book.mark(job.id, state="again" if job.state == "running" else "running", done=0)
            rows = self.service.prepare(change.facts, lambda done: self._progress(job, done)) if change.facts else None
            (found,) = self.service.apply([replace(change, rows=rows)])
        except EditError as error:
            found = error if isinstance(error, Problem) else Problem(422, str(error))
        if isinstance(found, Problem) and found.status == 503:
            self.book.mark(job.id, state="queued")
            raise found  # not the request's fault
        if isinstance(found, Problem):
            self.book.mark(job.id, state="failed", result=canonical(found.document()))
        else:
            self.book.mark(job.id, state="done", done=job.total, result=canonical(found))

    def _progress(self, job: Job, done: int) -> None:
        if self._stop:
            raise Problem(503, "the writer stops")
        self.book.mark(job.id, done=done)

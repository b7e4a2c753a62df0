"""Large requests: recorded before they are acknowledged, done one after the other; a restart goes on with them."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import insert, select, update

from malmen.data.records import Fact
from malmen.errors import EditError
from malmen.serve import tables
from malmen.serve.chain import canonical, now
from malmen.serve.changes import Change
from malmen.serve.ledger import Ledger
from malmen.serve.problems import Problem
from malmen.serve.service import EditService

log = logging.getLogger(__name__)
UNFINISHED = ("queued", "running", "again")  # again: a writer was lost while it was running


@dataclass(frozen=True)
class Job:
    """A large request."""

    id: str
    actor: str
    key: str | None
    state: str  # queued, running, again, done or failed
    done: int
    total: int
    result: dict[str, Any] | None
    request: dict[str, Any]

    def change(self) -> Change:
        """What is asked."""
        facts = tuple(Fact(*pair) for pair in self.request["facts"])
        rest = {"dry_run": self.request["dry_run"], "base_version": self.request["base_version"]}
        return Change(self.actor, facts, tuple(self.request["remove"]), self.key, **rest, job=self.id)


class JobBook:
    """The jobs of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def add(self, change: Change) -> Job:
        """Record a job; the same key again gives the job that it made."""
        known = self._find(actor=change.actor, key=change.key) if change.key else None
        if known is not None:
            if replace(known.change(), job=None) != change:
                raise Problem(422, f"the Idempotency-Key {change.key!r} was used for another request")
            return known
        request = {
            "facts": [[fact.prompt, fact.answer] for fact in change.facts],
            "remove": list(change.remove),
            "dry_run": change.dry_run,
            "base_version": change.base_version,
        }
        job = Job("j" + uuid.uuid4().hex[:20], change.actor, change.key, "queued", 0, len(change.facts), None, request)
        with self.ledger.changing() as connection:
            row = {**vars(job), "request": canonical(request), "at": now()}
            connection.execute(insert(tables.jobs).values(**row))
        return job

    def get(self, name: str) -> Job:
        """A job by id."""
        found = self._find(id=name)
        if found is None:
            raise Problem(404, f"there is no job {name!r}")
        return found

    def next(self) -> Job | None:
        """The oldest one that is not finished; one that was running when the writer died is begun again."""
        return self._find(tables.jobs.c.state.in_(UNFINISHED))

    def mark(self, name: str, **values: Any) -> None:
        """Progress, or the end."""
        unfinished = tables.jobs.c.state.in_(UNFINISHED)  # what is finished stays as it ended
        with self.ledger.changing() as connection:
            connection.execute(update(tables.jobs).where(unfinished).filter_by(id=name).values(**values))

    def _find(self, *conditions: Any, **values: Any) -> Job | None:
        query = select(tables.jobs).where(*conditions).filter_by(**values).order_by(tables.jobs.c.at).limit(1)
        with self.ledger.reading() as connection:
            row = connection.execute(query).mappings().first()
        if row is None:
            return None
        result = json.loads(row["result"]) if row["result"] else None
        kept = {name: row[name] for name in ("id", "actor", "key", "state", "done", "total")}
        return Job(**kept, result=result, request=json.loads(row["request"]))


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

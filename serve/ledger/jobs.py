"""Jobs: large changes, recorded before they are acknowledged and carried out later."""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from malmen.serve.ledger import tables
from malmen.serve.ledger.chain import now
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.ledger.tables import Job
from malmen.serve.messages import Change
from malmen.serve.problems import Problem

_UNFINISHED = tables.jobs.c.state.in_(("queued", "running", "again"))  # again: a writer died while it worked on it


class JobBook:
    """The jobs of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def add(self, change: Change, at_most: int | None = None) -> Job:
        """Record a job; the same key again gives the same job. Refused where `at_most` jobs are unfinished."""
        total, name = len(change.facts), "j" + uuid.uuid4().hex[:20]
        job = Job(name, change.actor, change.key, "queued", 0, total, None, change.request(), now())
        with self.ledger.writing() as connection:  # one at a time: two ingresses with the same key record one job
            known = _find(connection, actor=change.actor, key=change.key) if change.key else None
            if known is None:
                unfinished = select(func.count()).select_from(tables.jobs).where(_UNFINISHED)
                if at_most is not None and connection.execute(unfinished).scalar_one() >= at_most:
                    raise Problem(429, f"{at_most} large changes are waiting already", retry_after=10)
                connection.execute(insert(tables.jobs).values(**vars(job)))
                return job
        if known.request != job.request:
            raise Problem(422, f"the Idempotency-Key {change.key!r} was used for another request")
        return known

    def get(self, name: str) -> Job:
        """The job with this id."""
        with self.ledger.reading() as connection:
            job = _find(connection, id=name)
        if job is None:
            raise Problem(404, f"job {name!r} not found")
        return job

    def next(self) -> Job | None:
        """The oldest unfinished job, including one that was running when the writer died."""
        with self.ledger.reading() as connection:
            return _find(connection, _UNFINISHED)

    def mark(self, name: str, **values: Any) -> None:
        """Record progress, or the end."""
        unfinished = update(tables.jobs).where(_UNFINISHED)  # a finished job keeps its result
        with self.ledger.writing() as connection:
            connection.execute(unfinished.filter_by(id=name).values(**values))


def _find(connection: Connection, *conditions: Any, **values: Any) -> Job | None:
    query = select(tables.jobs).where(*conditions).filter_by(**values).order_by(tables.jobs.c.at).limit(1)
    row = connection.execute(query).mappings().first()
    return Job(**row) if row else None

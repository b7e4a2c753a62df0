"""Jobs: large changes, recorded before they are acknowledged and carried out later."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from malmen.data.records import Fact
from malmen.serve.ledger import tables
from malmen.serve.ledger.chain import now
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.messages import Change
from malmen.serve.problems import Problem

UNFINISHED = ("queued", "running", "again")  # again: a writer died while it worked on the job


@dataclass(frozen=True)
class Job:
    """A large change and how far it has come."""

    id: str
    actor: str
    key: str | None
    state: str  # queued, running, again, done or failed
    done: int  # facts
    total: int  # facts
    result: dict[str, Any] | None  # the reply, or the problem document
    request: dict[str, Any]

    def change(self) -> Change:
        """The change to carry out."""
        facts = tuple(Fact(*pair) for pair in self.request["facts"])
        rest = {"dry_run": self.request["dry_run"], "base_version": self.request["base_version"]}
        return Change(self.actor, facts, tuple(self.request["remove"]), self.key, **rest, job=self.id)


class JobBook:
    """The jobs of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def add(self, change: Change, at_most: int | None = None) -> Job:
        """Record a job; the same key again gives the same job. Refused where `at_most` jobs are unfinished."""
        request = {
            "facts": [[fact.prompt, fact.answer] for fact in change.facts],
            "remove": list(change.remove),
            "dry_run": change.dry_run,
            "base_version": change.base_version,
        }
        job = Job("j" + uuid.uuid4().hex[:20], change.actor, change.key, "queued", 0, len(change.facts), None, request)
        with self.ledger.writing() as connection:  # one at a time: two ingresses with the same key record one job
            known = _find(connection, actor=change.actor, key=change.key) if change.key else None
            if known is None:
                if at_most is not None and _num_unfinished(connection) >= at_most:
                    raise Problem(429, f"{at_most} large changes are waiting already", retry_after=10)
                connection.execute(insert(tables.jobs).values(**vars(job), at=now()))
                return job
        if replace(known.change(), job=None) != change:
            raise Problem(422, f"the Idempotency-Key {change.key!r} was used for another request")
        return known

    def get(self, name: str) -> Job:
        """The job with this id."""
        job = self._find(id=name)
        if job is None:
            raise Problem(404, f"job {name!r} not found")
        return job

    def next(self) -> Job | None:
        """The oldest unfinished job, including one that was running when the writer died."""
        return self._find(tables.jobs.c.state.in_(UNFINISHED))

    def mark(self, name: str, **values: Any) -> None:
        """Record progress, or the end."""
        unfinished = tables.jobs.c.state.in_(UNFINISHED)  # a finished job keeps its result
        with self.ledger.writing() as connection:
            connection.execute(update(tables.jobs).where(unfinished).filter_by(id=name).values(**values))

    def _find(self, *conditions: Any, **values: Any) -> Job | None:
        with self.ledger.reading() as connection:
            return _find(connection, *conditions, **values)


def _num_unfinished(connection: Connection) -> int:
    query = select(func.count()).select_from(tables.jobs).where(tables.jobs.c.state.in_(UNFINISHED))
    return int(connection.execute(query).scalar_one())


def _find(connection: Connection, *conditions: Any, **values: Any) -> Job | None:
    query = select(tables.jobs).where(*conditions).filter_by(**values).order_by(tables.jobs.c.at).limit(1)
    row = connection.execute(query).mappings().first()
    if row is None:
        return None
    return Job(**{name: value for name, value in row.items() if name != "at"})

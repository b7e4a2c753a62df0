"""What stands in the ledger, for whoever only reads it."""

from __future__ import annotations

import json
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, inspect, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from malmen.serve.http.problems import Problem
from malmen.serve.ledger import tables
from malmen.serve.ledger.chain import Entry
from malmen.serve.ledger.verify import verify


@dataclass(frozen=True)
class Version:
    """An immutable state of the model: a set of facts, and the shifts that make them hold."""

    id: str
    number: int
    parent: str | None
    shifts: str | None  # the blob; None for the unedited model
    num_facts: int
    report: dict[str, Any]
    actor: str
    at: str


@dataclass(frozen=True)
class Edit:
    """One correction."""

    id: str
    number: int
    version: str
    prompt: str
    answer: str
    rows: str
    position: int
    actor: str
    at: str
    report: dict[str, Any]


@dataclass(frozen=True)
class Alias:
    """A name that moves from version to version."""

    name: str
    version: str
    revision: int
    at: str


class LedgerView:
    """The ledger at a database URL."""

    def __init__(self, url: str) -> None:
        self.engine = tables.open_engine(url)
        self._members: dict[str, frozenset[str]] = {}  # by version: they are immutable
        self._lock = threading.Lock()

    def close(self) -> None:
        """Give up the connections."""
        self.engine.dispose()

    def about(self) -> dict[str, str]:
        """The base model and the editor that the ledger was begun with; empty before that."""
        with self.reading() as connection:
            if not inspect(connection).has_table(tables.marks.name):
                return {}
            found = connection.execute(select(tables.marks.c.value).filter_by(name="about")).scalar()
        return dict(json.loads(found)) if found else {}

    def alias(self, name: str) -> Alias | None:
        """An alias by name."""
        with self.reading() as connection:
            row = connection.execute(select(tables.aliases).filter_by(name=name)).mappings().first()
        return Alias(**row) if row else None

    def aliases(self) -> list[Alias]:
        """All of them, by name."""
        with self.reading() as connection:
            rows = connection.execute(select(tables.aliases).order_by(tables.aliases.c.name)).mappings().all()
        return [Alias(**row) for row in rows]

    def resolve(self, name: str) -> Version:
        """The version of an alias or id; a Problem where there is none."""
        with self.reading() as connection:
            there = connection.execute(select(tables.aliases.c.version).filter_by(name=name)).scalar()
            row = connection.execute(select(tables.versions).filter_by(id=there or name)).mappings().first()
            if row is None:
                known = connection.execute(select(tables.aliases.c.name)).scalars().all()
                raise Problem(404, f"there is no version or alias {name!r}; aliases: {', '.join(sorted(known))}")
        return _version(row)

    def versions(self, limit: int = 100, before: int | None = None) -> list[Version]:
        """The newest first, those with a number below `before`."""
        query = select(tables.versions).order_by(tables.versions.c.number.desc()).limit(limit)
        if before is not None:
            query = query.where(tables.versions.c.number < before)
        with self.reading() as connection:
            return [_version(row) for row in connection.execute(query).mappings()]

    def last_number(self) -> int:
        """The number of the newest version."""
        with self.reading() as connection:
            return int(connection.execute(select(func.max(tables.versions.c.number))).scalar_one())

    def edit(self, name: str) -> Edit | None:
        """A correction by id."""
        return next(iter(self.edits_by_id([name])), None)

    def edits_by_id(self, names: Sequence[str]) -> list[Edit]:
        """Corrections by id, in the order they were made."""
        found: list[Edit] = []
        with self.reading() as connection:
            for first in range(0, len(names), 500):  # databases limit the parameters of a statement
                query = select(tables.edits).where(tables.edits.c.id.in_(names[first : first + 500]))
                found += [_edit(row) for row in connection.execute(query).mappings()]
        return sorted(found, key=lambda edit: edit.number)

    def edits(self, limit: int = 100, before: int | None = None) -> list[Edit]:
        """The newest first, those with a number below `before`."""
        query = select(tables.edits).order_by(tables.edits.c.number.desc()).limit(limit)
        if before is not None:
            query = query.where(tables.edits.c.number < before)
        with self.reading() as connection:
            return [_edit(row) for row in connection.execute(query).mappings()]

    def ended(self, names: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
        """By correction: the versions that ended it, and how."""
        found: dict[str, list[tuple[str, str]]] = {}
        query = select(tables.changes).where(tables.changes.c.edit.in_(names), tables.changes.c.kind != "added")
        with self.reading() as connection:
            for row in connection.execute(query).mappings():
                found.setdefault(row["edit"], []).append((row["version"], row["kind"]))
        return found

    def changes(self, version: str) -> list[tuple[str, str]]:
        """(correction, how) of one version."""
        with self.reading() as connection:
            rows = connection.execute(select(tables.changes.c.edit, tables.changes.c.kind).filter_by(version=version))
            return [(edit, kind) for edit, kind in rows]

    def members(self, version: str) -> frozenset[str]:
        """The corrections that hold in a version: its parent's, and what it added and ended."""
        with self._lock:
            if version not in self._members:
                path = self._path(version, until=self._members)
                held = set(self._members.get(path[-1][1] or "", ()))
                changed = self._changes_of([name for name, _ in path])
                for name, _ in reversed(path):
                    for edit, kind in changed.get(name, ()):
                        (held.add if kind == "added" else held.discard)(edit)
                if len(self._members) > 64:
                    self._members.clear()
                self._members[version] = frozenset(held)
            return self._members[version]

    def ancestry(self, version: str) -> frozenset[str]:
        """A version and all that it was built on."""
        return frozenset(name for name, _ in self._path(version, until=()))

    def _path(self, version: str, until: Container[str]) -> list[tuple[str, str | None]]:
        """(version, parent) from a version down to the first, or to one whose parent is known already."""
        path: list[tuple[str, str | None]] = []
        current: str | None = version
        with self.reading() as connection:
            parents: Mapping[str, str | None] = {}
            while current is not None and current not in until:
                if len(path) == 20:  # a long way: all of it in one query
                    rows = connection.execute(select(tables.versions.c.id, tables.versions.c.parent))
                    parents = {row.id: row.parent for row in rows}
                query = select(tables.versions.c.parent).filter_by(id=current)
                parent = parents[current] if parents else connection.execute(query).scalar()
                path.append((current, parent))
                current = parent
        return path

    def _changes_of(self, names: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
        """By version: (correction, how)."""
        query = select(tables.changes)
        if len(names) <= 500:
            query = query.where(tables.changes.c.version.in_(names))
        found: dict[str, list[tuple[str, str]]] = {}
        with self.reading() as connection:
            for row in connection.execute(query).mappings():
                found.setdefault(row["version"], []).append((row["edit"], row["kind"]))
        return found

    def replay(self, actor: str, key: str) -> tuple[str, dict[str, Any]] | None:
        """The request's hash and the reply that an idempotency key stands for."""
        with self.reading() as connection:
            row = connection.execute(select(tables.replays).filter_by(actor=actor, key=key)).mappings().first()
        return (row["request"], json.loads(row["reply"])) if row else None

    def audit(self, after: int = -1, limit: int = 100) -> list[Entry]:
        """Entries from the oldest on, those beyond `after`."""
        query = select(tables.entries).where(tables.entries.c.seq > after).order_by(tables.entries.c.seq).limit(limit)
        with self.reading() as connection:
            return [Entry(**{**row, "body": json.loads(row["body"])}) for row in connection.execute(query).mappings()]

    def verify(self) -> dict[str, Any]:
        """Whether every entry is what was written, and all tables are what the entries say; of one moment."""
        same = {"isolation_level": "REPEATABLE READ"} if self.engine.dialect.name == "postgresql" else {}
        with told_as_problems(), self.engine.connect().execution_options(**same) as connection, connection.begin():
            return verify(connection)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with told_as_problems(), self.engine.connect() as connection, connection.begin():
            yield connection


@contextmanager
def told_as_problems() -> Iterator[None]:
    """A database that fails is the service's trouble, not the caller's: 503, to be tried again."""
    try:
        yield
    except IntegrityError as error:
        raise Problem(409, "somebody else changed the same thing at the same time; ask again") from error
    except (DBAPIError, PoolTimeout) as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise Problem(503, f"the ledger's database does not answer: {reason}") from error


def _version(row: Mapping[Any, Any]) -> Version:
    return Version(**{**row, "report": json.loads(row["report"])})


def _edit(row: Mapping[Any, Any]) -> Edit:
    return Edit(**{**row, "report": json.loads(row["report"])})

"""The ledger, opened for reading."""

from __future__ import annotations

import json
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, func, inspect, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from malmen.serve.ledger import tables
from malmen.serve.ledger.chain import Entry
from malmen.serve.ledger.verify import verify
from malmen.serve.problems import Conflict, Problem

_IN_LIST = 500  # databases limit the parameters of a statement


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
    """A fact that was added to the model."""

    id: str
    number: int
    version: str
    prompt: str
    answer: str
    rows: str  # the blob that holds its rows
    position: int  # which of the blob's facts it is
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
        """Close the connections."""
        self.engine.dispose()

    def about(self) -> dict[str, str]:
        """`base_model` and `editor` that the ledger began with; empty where there is no ledger yet."""
        with self.reading() as connection:
            if not inspect(connection).has_table(tables.marks.name):
                return {}
            about = connection.execute(select(tables.marks.c.value).filter_by(name="about")).scalar()
        return dict(json.loads(about)) if about else {}

    def alias(self, name: str) -> Alias | None:
        """The alias of this name, if there is one."""
        with self.reading() as connection:
            row = connection.execute(select(tables.aliases).filter_by(name=name)).mappings().first()
        return Alias(**row) if row else None

    def aliases(self) -> list[Alias]:
        """All aliases, ordered by name."""
        with self.reading() as connection:
            rows = connection.execute(select(tables.aliases).order_by(tables.aliases.c.name)).mappings().all()
        return [Alias(**row) for row in rows]

    def resolve(self, name: str) -> Version:
        """The version of an alias or id; a Problem 404 where there is none."""
        with self.reading() as connection:
            version = connection.execute(select(tables.aliases.c.version).filter_by(name=name)).scalar()
            row = connection.execute(select(tables.versions).filter_by(id=version or name)).mappings().first()
            if row is None:
                known = connection.execute(select(tables.aliases.c.name)).scalars().all()
                raise Problem(404, f"version or alias {name!r} not found; aliases: {', '.join(sorted(known))}")
        return Version(**row)

    def versions(self, limit: int = 100, before: int | None = None) -> list[Version]:
        """The newest first, those with a number below `before`."""
        return [Version(**row) for row in self._page(tables.versions, limit, before)]

    def last_number(self) -> int:
        """The number of the newest version."""
        with self.reading() as connection:
            return int(connection.execute(select(func.max(tables.versions.c.number))).scalar_one())

    def edit(self, name: str) -> Edit | None:
        """The edit with this id, if there is one."""
        return next(iter(self.edits_by_id([name])), None)

    def edits_by_id(self, names: Sequence[str]) -> list[Edit]:
        """Edits by id, in the order they were made."""
        edits: list[Edit] = []
        with self.reading() as connection:
            for first in range(0, len(names), _IN_LIST):
                query = select(tables.edits).where(tables.edits.c.id.in_(names[first : first + _IN_LIST]))
                edits += [Edit(**row) for row in connection.execute(query).mappings()]
        return sorted(edits, key=lambda edit: edit.number)

    def edits(self, limit: int = 100, before: int | None = None) -> list[Edit]:
        """The newest first, those with a number below `before`."""
        return [Edit(**row) for row in self._page(tables.edits, limit, before)]

    def _page(self, table: Table, limit: int, before: int | None) -> Sequence[Mapping[Any, Any]]:
        query = select(table).order_by(table.c.number.desc()).limit(limit)
        if before is not None:
            query = query.where(table.c.number < before)
        with self.reading() as connection:
            return connection.execute(query).mappings().all()

    def ended(self, names: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
        """By edit: the versions that ended it, each with `removed` or `superseded`."""
        ended: dict[str, list[tuple[str, str]]] = {}
        for row in self._changes(tables.changes.c.edit.in_(names), tables.changes.c.kind != "added"):
            ended.setdefault(row["edit"], []).append((row["version"], row["kind"]))
        return ended

    def changes(self, version: str) -> dict[str, str]:
        """What a version changed: by edit, `added`, `removed` or `superseded`."""
        return {row["edit"]: row["kind"] for row in self._changes(tables.changes.c.version == version)}

    def _changes(self, *conditions: ColumnElement[bool]) -> Sequence[Mapping[Any, Any]]:
        with self.reading() as connection:
            return connection.execute(select(tables.changes).where(*conditions)).mappings().all()

    def members(self, version: str) -> frozenset[str]:
        """The edits that hold in a version: its parent's, with those it added and without those it ended."""
        with self._lock:
            if version not in self._members:
                path = self._path(version, until=self._members)
                held = set(self._members.get(path[-1][1] or "", ()))
                names = [name for name, _ in path]
                changed: dict[str, list[Mapping[Any, Any]]] = {}
                few = [tables.changes.c.version.in_(names)] if len(names) <= _IN_LIST else []
                for row in self._changes(*few):
                    changed.setdefault(row["version"], []).append(row)
                for name in reversed(names):
                    for row in changed.get(name, ()):
                        (held.add if row["kind"] == "added" else held.discard)(row["edit"])
                if len(self._members) > 64:
                    self._members.clear()
                self._members[version] = frozenset(held)
            return self._members[version]

    def ancestry(self, version: str) -> frozenset[str]:
        """A version and all its ancestors."""
        return frozenset(name for name, _ in self._path(version, until=()))

    def _path(self, version: str, until: Container[str]) -> list[tuple[str, str | None]]:
        """(version, parent) from a version to the first one, or to one whose parent is in `until`."""
        path: list[tuple[str, str | None]] = []
        current: str | None = version
        with self.reading() as connection:
            parents: Mapping[str, str | None] = {}
            while current is not None and current not in until:
                if len(path) == 20:  # a long path: read all parents in one query
                    rows = connection.execute(select(tables.versions.c.id, tables.versions.c.parent))
                    parents = {row.id: row.parent for row in rows}
                query = select(tables.versions.c.parent).filter_by(id=current)
                parent = parents[current] if parents else connection.execute(query).scalar()
                path.append((current, parent))
                current = parent
        return path

    def audit(self, after: int = -1, limit: int = 100) -> list[Entry]:
        """Entries after number `after`, the oldest first."""
        query = select(tables.entries).where(tables.entries.c.seq > after).order_by(tables.entries.c.seq).limit(limit)
        with self.reading() as connection:
            return [Entry(**row) for row in connection.execute(query).mappings()]

    def verify(self) -> dict[str, Any]:
        """Whether all entries are as they were written and all tables agree with them, in one snapshot."""
        snapshot = {"isolation_level": "REPEATABLE READ"} if self.engine.dialect.name == "postgresql" else {}
        with database_problems(), self.engine.connect().execution_options(**snapshot) as connection, connection.begin():
            return verify(connection)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with database_problems(), self.engine.connect() as connection, connection.begin():
            yield connection


@contextmanager
def database_problems() -> Iterator[None]:
    """Turn a database's errors into problems: 409 for a concurrent change, else 503."""
    try:
        yield
    except IntegrityError as error:
        raise Conflict(409, "the same rows were changed at the same time; repeat the request") from error
    except (DBAPIError, PoolTimeout) as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise Problem(503, f"the ledger's database does not answer: {reason}") from error

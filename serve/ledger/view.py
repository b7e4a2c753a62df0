"""The ledger, opened for reading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import CTE, Connection, Select, Table, func, inspect, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from malmen.serve.ledger import tables
from malmen.serve.ledger.chain import Entry
from malmen.serve.ledger.tables import Alias, Edit, Version
from malmen.serve.ledger.verify import verify
from malmen.serve.problems import Conflict, Problem

_IN_LIST = 500  # databases limit the parameters of a statement


class LedgerView:
    """The ledger at a database URL."""

    def __init__(self, url: str) -> None:
        self.engine = tables.open_engine(url)
        self._members: dict[str, frozenset[str]] = {}  # by version: they are immutable

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

    def alias(self, name: str) -> Alias:
        """The alias of this name; a Problem 404 where there is none."""
        for row in self._rows(select(tables.aliases).filter_by(name=name)):
            return Alias(**row)
        raise Problem(404, f"alias {name!r} not found")

    def aliases(self) -> list[Alias]:
        """All aliases, ordered by name."""
        return [Alias(**row) for row in self._rows(select(tables.aliases).order_by(tables.aliases.c.name))]

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

    def edit(self, name: str) -> Edit:
        """The edit with this id; a Problem 404 where there is none."""
        for edit in self.edits_by_id([name]):
            return edit
        raise Problem(404, f"edit {name!r} not found")

    def edits_by_id(self, names: Sequence[str]) -> list[Edit]:
        """Edits by id, in the order they were made."""
        edits: list[Edit] = []
        for first in range(0, len(names), _IN_LIST):
            query = select(tables.edits).where(tables.edits.c.id.in_(names[first : first + _IN_LIST]))
            edits += [Edit(**row) for row in self._rows(query)]
        return sorted(edits, key=lambda edit: edit.number)

    def edits(self, limit: int = 100, before: int | None = None) -> list[Edit]:
        """The newest first, those with a number below `before`."""
        return [Edit(**row) for row in self._page(tables.edits, limit, before)]

    def _page(self, table: Table, limit: int, before: int | None) -> Sequence[Mapping[Any, Any]]:
        query = select(table).order_by(table.c.number.desc()).limit(limit)
        return self._rows(query if before is None else query.where(table.c.number < before))

    def ended(self, names: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
        """By edit: the versions that ended it, each with `removed` or `superseded`."""
        ended: dict[str, list[tuple[str, str]]] = {}
        for row in self._rows(select(tables.changes).where(tables.changes.c.edit.in_(names))):
            if row["kind"] != "added":
                ended.setdefault(row["edit"], []).append((row["version"], row["kind"]))
        return ended

    def changes(self, version: str) -> dict[str, str]:
        """What a version changed: by edit, `added`, `removed` or `superseded`."""
        return {row["edit"]: row["kind"] for row in self._rows(select(tables.changes).filter_by(version=version))}

    def members(self, version: str) -> frozenset[str]:
        """The edits that hold in a version: those that it or an ancestor added, and none of them ended."""
        held = self._members.get(version)
        if held is None:
            path, change = _ancestry(version), tables.changes.c
            query = select(change.edit).join(path, path.c.id == change.version).group_by(change.edit)
            # An edit is added once and ends once at most: it holds where the one change of it is the first.
            held = frozenset(row["edit"] for row in self._rows(query.having(func.count() == 1)))
            if len(self._members) > 64:
                self._members.clear()
            self._members[version] = held
        return held

    def ancestry(self, version: str) -> frozenset[str]:
        """A version and all its ancestors."""
        return frozenset(row["id"] for row in self._rows(select(_ancestry(version).c.id)))

    def audit(self, after: int = -1, limit: int = 100) -> list[Entry]:
        """Entries after number `after`, the oldest first."""
        query = select(tables.entries).where(tables.entries.c.seq > after).order_by(tables.entries.c.seq).limit(limit)
        return [Entry(**row) for row in self._rows(query)]

    def verify(self) -> dict[str, Any]:
        """Whether all entries are as they were written and all tables agree with them, in one snapshot."""
        snapshot = {"isolation_level": "REPEATABLE READ"} if self.engine.dialect.name == "postgresql" else {}
        with database_problems(), self.engine.connect().execution_options(**snapshot) as connection, connection.begin():
            return verify(connection)

    def _rows(self, query: Select[Any]) -> Sequence[Mapping[Any, Any]]:
        with self.reading() as connection:
            return connection.execute(query).mappings().all()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with database_problems(), self.engine.begin() as connection:
            yield connection


def _ancestry(version: str) -> CTE:
    """A version and all its ancestors, with their parents."""
    table = tables.versions
    path = select(table.c.id, table.c.parent).filter_by(id=version).cte(recursive=True)
    return path.union_all(select(table.c.id, table.c.parent).join(path, table.c.id == path.c.parent))


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

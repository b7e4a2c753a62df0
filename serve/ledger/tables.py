"""The ledger's tables, on sqlite and on PostgreSQL, and the records that are read from them."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from malmen.data.records import Fact
from malmen.errors import UsageError
from malmen.serve.ledger.chain import Entry, canonical
from malmen.serve.messages import Change


class Json(sa.TypeDecorator[Any]):
    """A value as canonical JSON text. A text that is no longer JSON was changed: it is read as `unreadable`."""

    impl, cache_ok = sa.Text, True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        """To the database."""
        return None if value is None else canonical(value)

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        """From the database."""
        try:
            return None if value is None else json.loads(value)
        except ValueError:
            return {"unreadable": value}


Actor = Annotated[str, sa.String(200)]
Time = Annotated[str, sa.String(32)]
VersionId = Annotated[str, sa.String(20)]


@dataclass(frozen=True)
class Version:
    """An immutable state of the model: a set of facts, and the shifts that make them hold."""

    id: VersionId
    number: int
    parent: Annotated[str | None, sa.String(20)]
    shifts: Annotated[str | None, sa.String(64)]  # the blob; None for the unedited model
    num_facts: int
    report: dict[str, Any]
    actor: Actor
    at: Time


@dataclass(frozen=True)
class NewEdit:
    """A fact that is added to the model."""

    id: Annotated[str, sa.String(40)]
    prompt: str
    answer: str
    rows: Annotated[str, sa.String(64)]  # the blob that holds its rows
    position: int  # which of the blob's facts it is
    report: dict[str, Any]


@dataclass(frozen=True)
class Edit(NewEdit):
    """A fact that was added to the model."""

    number: int
    version: VersionId  # the first that holds it
    actor: Actor
    at: Time


@dataclass(frozen=True)
class Alias:
    """A name that moves from version to version."""

    name: Annotated[str, sa.String(100)]
    version: VersionId
    revision: int  # grows with each move
    at: Time


@dataclass(frozen=True)
class Job:
    """A large change and how far it has come."""

    id: Annotated[str, sa.String(40)]
    actor: Actor
    key: Annotated[str | None, sa.String(200)]
    state: Annotated[str, sa.String(12)]  # queued, running, again, done or failed
    done: int  # facts
    total: int  # facts
    result: Annotated[dict[str, Any] | None, Json]  # the reply, or the problem document
    request: dict[str, Any]
    at: Time

    def change(self) -> Change:
        """The change to carry out."""
        facts = tuple(Fact(*pair) for pair in self.request["facts"])
        rest = {"dry_run": self.request["dry_run"], "base_version": self.request["base_version"]}
        return Change(self.actor, facts, tuple(self.request["remove"]), self.key, **rest, job=self.id)


LIVE, BASE = "live", "base"  # the aliases that a ledger begins with
metadata = sa.MetaData()
_TYPES = {int: sa.Integer, str: sa.Text}  # of fields that name no other


def _table_of(record: type, name: str, key: str, unique: str | None = None) -> sa.Table:
    """A table with a column for each field of a record; only a field that may be None may be NULL."""
    columns = []
    for field, hint in get_type_hints(record, include_extras=True).items():
        value, kind = get_args(hint) if get_origin(hint) is Annotated else (hint, _TYPES.get(hint, Json))
        null = type(None) in get_args(value)
        columns.append(
            sa.Column(field, kind, primary_key=field == key, unique=field == unique, nullable=null, autoincrement=False)
        )
    return sa.Table(name, metadata, *columns)


entries = _table_of(Entry, "entries", "seq")  # append-only; all other tables could be rebuilt from it
versions = _table_of(Version, "versions", "id", unique="number")
edits = _table_of(Edit, "edits", "id", unique="number")
aliases = _table_of(Alias, "aliases", "name")
changes = sa.Table(
    "changes",
    metadata,
    sa.Column("version", sa.String(20), primary_key=True),
    sa.Column("edit", sa.String(40), primary_key=True),
    sa.Column("kind", sa.String(12), nullable=False),  # added, removed or superseded
    sa.Index("changes_by_edit", "edit"),
)
replays = sa.Table(
    "replays",
    metadata,
    sa.Column("actor", sa.String(200), primary_key=True),
    sa.Column("key", sa.String(200), primary_key=True),
    sa.Column("request", sa.String(64), nullable=False),  # a hash
    sa.Column("reply", Json, nullable=False),
)
jobs = _table_of(Job, "jobs", "id")
marks = sa.Table(
    "marks", metadata, sa.Column("name", sa.String(40), primary_key=True), sa.Column("value", sa.Text, nullable=False)
)


def open_engine(url: str) -> sa.Engine:
    """An engine for the ledger; sqlite runs in WAL mode and syncs to the disk at each commit."""
    try:
        kind = sa.make_url(url).get_backend_name()
    except ArgumentError as error:
        raise UsageError(f"cannot read the database URL: {error}") from error
    if kind not in ("sqlite", "postgresql"):
        raise UsageError(f"the ledger needs sqlite or postgresql; given a URL of {kind!r}")
    if kind == "postgresql":
        # A server that does not answer is an error after seconds, not an endless wait.
        options = {"connect_timeout": 5, "options": "-c statement_timeout=15000 -c lock_timeout=10000"}
        return sa.create_engine(url, pool_pre_ping=True, connect_args=options)
    engine = sa.create_engine(url, connect_args={"timeout": 10})
    sa.event.listen(engine, "connect", _set_up_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    assert isinstance(connection, sqlite3.Connection)
    connection.isolation_level = None  # Python begins transactions too late: see _begin_sqlite
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    """A writer takes its lock at the start: sqlite does not wait for one that is requested half-way."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

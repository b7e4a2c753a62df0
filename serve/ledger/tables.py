"""The ledger's tables, on sqlite and on PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Dialect,
    Engine,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    create_engine,
    event,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from malmen.errors import UsageError
from malmen.serve.ledger.chain import canonical


class Json(TypeDecorator[Any]):
    """A value as canonical JSON text. A text that is no longer JSON was changed: it is read as `unreadable`."""

    impl, cache_ok = Text, True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else canonical(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """From the database."""
        try:
            return None if value is None else json.loads(value)
        except ValueError:
            return {"unreadable": value}


LIVE, BASE = "live", "base"  # the aliases that a ledger begins with
metadata = MetaData()

entries = Table(  # append-only and chained by hashes; all other tables could be rebuilt from it
    "entries",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("at", String(32), nullable=False),
    Column("actor", String(200), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("body", Json, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
)
versions = Table(
    "versions",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("number", Integer, nullable=False, unique=True),
    Column("parent", String(20)),
    Column("shifts", String(64)),  # the blob; none for the unedited model
    Column("num_facts", Integer, nullable=False),
    Column("report", Json, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("at", String(32), nullable=False),
)
edits = Table(
    "edits",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("number", Integer, nullable=False, unique=True),
    Column("version", String(20), nullable=False),  # the first that holds it
    Column("prompt", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("rows", String(64), nullable=False),  # the blob with its rows …
    Column("position", Integer, nullable=False),  # … and which of the blob's facts it is
    Column("actor", String(200), nullable=False),
    Column("at", String(32), nullable=False),
    Column("report", Json, nullable=False),
)
changes = Table(
    "changes",
    metadata,
    Column("version", String(20), primary_key=True),
    Column("edit", String(40), primary_key=True),
    Column("kind", String(12), nullable=False),  # added, removed or superseded
    Index("changes_by_edit", "edit"),
)
aliases = Table(
    "aliases",
    metadata,
    Column("name", String(100), primary_key=True),
    Column("version", String(20), nullable=False),
    Column("revision", Integer, nullable=False),  # grows with each move
    Column("at", String(32), nullable=False),
)
replays = Table(
    "replays",
    metadata,
    Column("actor", String(200), primary_key=True),
    Column("key", String(200), primary_key=True),
    Column("request", String(64), nullable=False),  # a hash
    Column("reply", Json, nullable=False),
)
jobs = Table(
    "jobs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("actor", String(200), nullable=False),
    Column("key", String(200)),
    Column("request", Json, nullable=False),
    Column("state", String(12), nullable=False),  # queued, running, done or failed
    Column("done", Integer, nullable=False),  # facts
    Column("total", Integer, nullable=False),
    Column("result", Json),
    Column("at", String(32), nullable=False),
)
marks = Table(
    "marks",
    metadata,
    Column("name", String(40), primary_key=True),
    Column("value", Text, nullable=False),
)


def open_engine(url: str) -> Engine:
    """An engine for the ledger; sqlite runs in WAL mode and syncs to the disk at each commit."""
    try:
        kind = make_url(url).get_backend_name()
    except ArgumentError as error:
        raise UsageError(f"cannot read the database URL: {error}") from error
    if kind not in ("sqlite", "postgresql"):
        raise UsageError(f"the ledger needs sqlite or postgresql; given a URL of {kind!r}")
    if kind == "postgresql":
        # A server that does not answer is an error after seconds, not an endless wait.
        options = {"connect_timeout": 5, "options": "-c statement_timeout=15000 -c lock_timeout=10000"}
        return create_engine(url, pool_pre_ping=True, connect_args=options)
    engine = create_engine(url, connect_args={"timeout": 10})
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    assert isinstance(connection, sqlite3.Connection)
    connection.isolation_level = None  # Python begins transactions too late: see _begin_sqlite
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """A writer takes its lock at the start: sqlite does not wait for one that is requested half-way."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

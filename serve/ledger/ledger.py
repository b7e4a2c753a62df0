"""The durable record of edits: who asked for what, and which version of the model came of it.

A publication is one transaction: all of it or nothing. Each entry contains the hash of the one before, so that a row
that was changed, removed or inserted is detected. Nothing is deleted: a removal is an entry too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from malmen.errors import EditError
from malmen.serve.ledger import tables
from malmen.serve.ledger.chain import GENESIS, canonical, chain_entry, digest, now
from malmen.serve.ledger.tables import BASE, LIVE, Alias, NewEdit, Version
from malmen.serve.ledger.view import LedgerView, database_problems
from malmen.serve.messages import Change, EditReply, Outcome, Receipt
from malmen.serve.problems import Conflict, Problem


@dataclass(frozen=True)
class AcceptedChange:
    """One caller's part of a publication."""

    change: Change
    added: tuple[NewEdit, ...]
    ended: tuple[tuple[str, str], ...]  # (edit, removed or superseded)
    reply: EditReply


class Ledger(LedgerView):
    """The ledger of one editor on one base model, opened for writing."""

    def __init__(self, url: str, base_model: str, editor: str) -> None:
        """`editor` is a hash of the editor's weights: the rows of two editors cannot be added."""
        super().__init__(url)
        self.base_model, self.editor = base_model, editor
        with self.writing() as connection:
            tables.metadata.create_all(connection)
            self._begin(connection)

    def take_over(self) -> int:
        """Become the one writer, and return the epoch to publish with; an earlier writer can publish no more."""
        with self.writing() as connection:
            epoch = int(_mark(connection, "writer")) + 1
            _set_mark(connection, "writer", str(epoch))
        return epoch

    def publish(self, version: Version, accepted: Sequence[AcceptedChange], live_revision: int, epoch: int) -> None:
        """Record a version and move `live` to it, all or nothing; `live_revision`: that of `live` when solved."""
        with self.writing() as connection:
            if int(_mark(connection, "writer")) != epoch:
                raise Problem(503, "another writer has taken over; this one can publish no more")
            moved = connection.execute(
                update(tables.aliases)
                .filter_by(name=LIVE, version=version.parent, revision=live_revision)
                .values(version=version.id, revision=live_revision + 1, at=now())
            )
            if moved.rowcount != 1:
                raise Conflict(409, f"`live` no longer points to {version.parent}; repeat the request")
            for part in accepted:
                self._record_change(connection, version, part)
            connection.execute(insert(tables.versions).values(**vars(version)))

    def _record_change(self, connection: Connection, version: Version, accepted: AcceptedChange) -> None:
        change, at = accepted.change, now()
        body = {
            "version": version.id,
            "parent": version.parent,
            "shifts": version.shifts,
            "added": [[new.id, new.prompt, new.answer, new.rows, new.position] for new in accepted.added],
            "ended": [list(pair) for pair in accepted.ended],
            "key": change.key,
        }
        self._append(connection, change.actor, "edit", body, at)
        first = connection.execute(select(func.count()).select_from(tables.edits)).scalar_one()
        edits = [
            {**vars(new), "number": number, "version": version.id, "actor": change.actor, "at": at}
            for number, new in enumerate(accepted.added, first)
        ]
        changes = [
            {"version": version.id, "edit": edit, "kind": kind}
            for edit, kind in [*((new.id, "added") for new in accepted.added), *accepted.ended]
        ]
        for table, rows in ((tables.edits, edits), (tables.changes, changes)):
            if rows:
                connection.execute(insert(table), rows)
        _store_reply(connection, change, accepted.reply)
        if change.job:
            result = accepted.reply.model_dump(mode="json")
            connection.execute(update(tables.jobs).filter_by(id=change.job).values(state="done", result=result))

    def store_reply(self, change: Change, reply: EditReply) -> None:
        """Keep the reply to a change that needed no new version, for when its key is used again."""
        with self.writing() as connection:
            _store_reply(connection, change, reply)

    def replay(self, change: Change) -> Outcome | None:
        """The reply to an earlier change with the same key; a Problem where that one asked for something else."""
        if change.key is None:
            return None
        for row in self._rows(select(tables.replays).filter_by(actor=change.actor, key=change.key)):
            if row["request"] != _fingerprint(change):
                return Problem(422, f"the Idempotency-Key {change.key!r} was used for another request")
            return Receipt(EditReply.model_validate(row["reply"]), replayed=True)
        return None

    def set_alias(self, name: str, version: str, revision: int | None, actor: str) -> Alias:
        """Move an alias, or create one; `revision` is the state that the caller has seen (None: it must be new)."""
        if name == BASE:
            raise Problem(409, "`base` is the unedited model and cannot be moved")
        if re.fullmatch(r"v[0-9a-f]{16}", name):
            raise Problem(422, f"{name!r} looks like a version's id: choose another name for an alias")
        with self.writing() as connection:
            if connection.execute(select(tables.versions.c.id).filter_by(id=version)).first() is None:
                raise Problem(404, f"version {version!r} not found")
            current = connection.execute(select(tables.aliases.c.revision).filter_by(name=name)).scalar()
            if current is not None and revision is None:
                raise Problem(428, f'the alias {name!r} exists: send If-Match with its ETag, which is "{current}" now')
            if revision is not None and current != revision:
                state = f'is at "{current}"' if current is not None else "does not exist"
                raise Problem(412, f'If-Match names "{revision}", but the alias {name!r} {state}')
            alias = Alias(name, version, 1 if current is None else current + 1, now())
            statement = insert(tables.aliases) if current is None else update(tables.aliases).filter_by(name=name)
            connection.execute(statement.values(**vars(alias)))
            self._append(connection, actor, "alias", {"name": name, "version": version, "revision": alias.revision})
        return alias

    def _begin(self, connection: Connection) -> None:
        """Record the first entry and the unedited version; refuse a ledger of another editor or model."""
        about = {"base_model": self.base_model, "editor": self.editor}
        recorded = connection.execute(select(tables.marks.c.value).filter_by(name="about")).scalar()
        if recorded is not None:
            if json.loads(recorded) != about:
                raise EditError(
                    f"the ledger belongs to another editor or base model: it has {recorded}, given {canonical(about)}; "
                    "choose another --store, or the editor that the ledger began with"
                )
            return
        root, at = "v" + digest(about)[:16], now()
        for name, value in (("about", canonical(about)), ("writer", "0"), ("head", f"-1 {GENESIS}")):
            connection.execute(insert(tables.marks).values(name=name, value=value))
        version = Version(root, 0, None, None, 0, {}, "malmen", at)
        connection.execute(insert(tables.versions).values(**vars(version)))
        for name in (BASE, LIVE):
            connection.execute(insert(tables.aliases).values(name=name, version=root, revision=1, at=at))
        self._append(connection, "malmen", "begin", {**about, "version": root}, at)

    def _append(self, connection: Connection, actor: str, kind: str, body: dict[str, Any], at: str = "") -> None:
        last, previous = _mark(connection, "head").split(" ")
        entry = chain_entry(int(last) + 1, at or now(), actor, kind, body, previous)
        connection.execute(insert(tables.entries).values(**vars(entry)))
        _set_mark(connection, "head", f"{entry.seq} {entry.hash}")

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes; there is one at a time."""
        engine = self.engine.execution_options(writes=True)
        with database_problems(), engine.begin() as connection:
            if engine.dialect.name == "postgresql":  # sqlite's BEGIN IMMEDIATE does the same
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7205759403792793)")
            yield connection


def _mark(connection: Connection, name: str) -> str:
    return str(connection.execute(select(tables.marks.c.value).filter_by(name=name)).scalar_one())


def _set_mark(connection: Connection, name: str, value: str) -> None:
    connection.execute(update(tables.marks).filter_by(name=name).values(value=value))


def _store_reply(connection: Connection, change: Change, reply: EditReply) -> None:
    if change.key is not None:
        row = {"actor": change.actor, "key": change.key, "request": _fingerprint(change)}
        connection.execute(insert(tables.replays).values(**row, reply=reply.model_dump(mode="json")))


def _fingerprint(change: Change) -> str:
    return digest(list(change.request().values()))

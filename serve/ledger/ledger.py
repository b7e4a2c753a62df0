"""The durable record of edits: what was asked, by whom, and which version of the model came of it.

A publication is one transaction: it is there whole, or not at all. Its entry is chained to the one before by a hash, so
that a row which was changed, removed or slipped in shows. Nothing is ever deleted: a removal is an entry too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from malmen.errors import EditError
from malmen.serve.http.problems import Problem
from malmen.serve.ledger import tables
from malmen.serve.ledger.chain import GENESIS, canonical, chain_entry, digest, now
from malmen.serve.ledger.tables import BASE, LIVE
from malmen.serve.ledger.view import Alias, LedgerView, told_as_problems


@dataclass(frozen=True)
class NewEdit:
    """A correction to be recorded."""

    id: str
    prompt: str
    answer: str
    rows: str
    position: int
    report: dict[str, Any]


@dataclass(frozen=True)
class AcceptedRequest:
    """One caller's part of a publication."""

    actor: str
    added: tuple[NewEdit, ...]
    ended: tuple[tuple[str, str], ...]  # (edit, removed or superseded)
    reply: dict[str, Any]
    key: str | None = None
    request: str = ""  # the hash of what was asked, for a key that is used again
    job: str | None = None


@dataclass(frozen=True)
class Publication:
    """A new version, as it will stand in the ledger."""

    version: str
    number: int
    parent: str
    live_revision: int  # where `live` was when this was computed
    shifts: str | None
    num_facts: int
    report: dict[str, Any]
    requests: tuple[AcceptedRequest, ...]


class Ledger(LedgerView):
    """The ledger of one editor on one base model, to be written."""

    def __init__(self, url: str, base_model: str, editor: str) -> None:
        """`editor` is a hash of the editor's weights: rows of another one would not add up."""
        super().__init__(url)
        self.base_model, self.editor = base_model, editor
        with self.changing() as connection:
            tables.metadata.create_all(connection)
            self._begin(connection)

    def take_over(self) -> int:
        """Become the one writer: whoever was it before can publish no more."""
        with self.changing() as connection:
            epoch = int(_mark(connection, "writer")) + 1
            _set_mark(connection, "writer", str(epoch))
        return epoch

    def publish(self, publication: Publication, epoch: int) -> None:
        """Record a version with all that it came of, and move `live` to it; all of it or nothing."""
        with self.changing() as connection:
            if int(_mark(connection, "writer")) != epoch:
                raise Problem(503, "another writer has taken over; this one publishes no more")
            moved = connection.execute(
                update(tables.aliases)
                .where(tables.aliases.c.name == LIVE, tables.aliases.c.revision == publication.live_revision)
                .where(tables.aliases.c.version == publication.parent)
                .values(version=publication.version, revision=publication.live_revision + 1, at=now())
            )
            if moved.rowcount != 1:
                raise Problem(409, f"`live` was moved away from {publication.parent} meanwhile; ask again")
            for request in publication.requests:
                self._record_request(connection, publication, request)
            connection.execute(
                insert(tables.versions).values(
                    id=publication.version,
                    number=publication.number,
                    parent=publication.parent,
                    shifts=publication.shifts,
                    num_facts=publication.num_facts,
                    report=canonical(publication.report),
                    actor=", ".join(dict.fromkeys(request.actor for request in publication.requests))[:200],
                    at=now(),
                )
            )

    def _record_request(self, connection: Connection, publication: Publication, request: AcceptedRequest) -> None:
        at, first = now(), connection.execute(select(func.count()).select_from(tables.edits)).scalar_one()
        body = {
            "version": publication.version,
            "parent": publication.parent,
            "shifts": publication.shifts,
            "added": [[new.id, new.prompt, new.answer, new.rows, new.position] for new in request.added],
            "ended": [list(pair) for pair in request.ended],
            "key": request.key,
        }
        self._append(connection, request.actor, "edit", body, at)
        changed = [(new.id, "added") for new in request.added] + list(request.ended)
        if request.added:
            rows = [
                {**vars(new), "report": canonical(new.report), "number": first + index, "version": publication.version,
                 "actor": request.actor, "at": at}
                for index, new in enumerate(request.added)
            ]  # fmt: skip
            connection.execute(insert(tables.edits), rows)
        if changed:
            rows = [{"version": publication.version, "edit": edit, "kind": kind} for edit, kind in changed]
            connection.execute(insert(tables.changes), rows)
        self._remember(connection, request.actor, request.key, request.request, request.reply)
        if request.job:
            _end_job(connection, request.job, "done", request.reply)

    def remember(self, actor: str, key: str | None, request: str, reply: dict[str, Any]) -> None:
        """Keep the reply to a request that changed nothing, for when its key comes again."""
        if key is not None:
            with self.changing() as connection:
                self._remember(connection, actor, key, request, reply)

    def set_alias(self, name: str, version: str, revision: int | None, actor: str) -> Alias:
        """Move an alias, or make one; `revision` is the state that the caller has seen (None: it is to be new)."""
        if name == BASE:
            raise Problem(409, "`base` is the unedited model and does not move")
        if re.fullmatch(r"v[0-9a-f]{16}", name):
            raise Problem(422, f"{name!r} looks like a version's id: choose another name for an alias")
        with self.changing() as connection:
            if connection.execute(select(tables.versions.c.id).filter_by(id=version)).first() is None:
                raise Problem(404, f"there is no version {version!r}")
            there = connection.execute(select(tables.aliases.c.revision).filter_by(name=name)).scalar()
            if there is not None and revision is None:
                raise Problem(428, f'the alias {name!r} exists: send If-Match with its ETag, "{there}" now')
            if revision is not None and there != revision:
                found = f'is at "{there}"' if there is not None else "does not exist"
                raise Problem(412, f'If-Match names "{revision}", but the alias {name!r} {found}')
            alias = Alias(name, version, 1 if there is None else there + 1, now())
            if there is None:
                connection.execute(insert(tables.aliases).values(**vars(alias)))
            else:
                connection.execute(update(tables.aliases).filter_by(name=name).values(**vars(alias)))
            self._append(connection, actor, "alias", {"name": name, "version": version, "revision": alias.revision})
        return alias

    # --- pieces ------------------------------------------------------------------------------------------

    def _begin(self, connection: Connection) -> None:
        """The first entry and the unedited version; a ledger of something else is refused."""
        about = {"base_model": self.base_model, "editor": self.editor}
        there = connection.execute(select(tables.marks.c.value).filter_by(name="about")).scalar()
        if there is not None:
            if json.loads(there) != about:
                raise EditError(
                    f"the ledger belongs to another editor or base model: to {there}, and this is {canonical(about)}; "
                    "choose another --store, or load the editor that it was begun with"
                )
            return
        root, at = "v" + digest(canonical(about))[:16], now()
        for name, value in (("about", canonical(about)), ("writer", "0"), ("head", f"-1 {GENESIS}")):
            connection.execute(insert(tables.marks).values(name=name, value=value))
        values = {"id": root, "number": 0, "num_facts": 0, "report": "{}", "actor": "malmen", "at": at}
        connection.execute(insert(tables.versions).values(**values))
        for name in (BASE, LIVE):
            connection.execute(insert(tables.aliases).values(name=name, version=root, revision=1, at=at))
        self._append(connection, "malmen", "begin", {**about, "version": root}, at)

    def _append(self, connection: Connection, actor: str, kind: str, body: dict[str, Any], at: str = "") -> None:
        last, previous = _mark(connection, "head").split(" ")
        entry = chain_entry(int(last) + 1, at or now(), actor, kind, body, previous)
        connection.execute(insert(tables.entries).values(**{**vars(entry), "body": canonical(body)}))
        _set_mark(connection, "head", f"{entry.seq} {entry.hash}")

    def _remember(
        self, connection: Connection, actor: str, key: str | None, request: str, reply: dict[str, Any]
    ) -> None:
        if key is not None:
            values = {"actor": actor, "key": key, "request": request, "reply": canonical(reply)}
            connection.execute(insert(tables.replays).values(**values))

    @contextmanager
    def changing(self) -> Iterator[Connection]:
        """A transaction that writes: one at a time, whole or not at all."""
        with told_as_problems(), self.engine.connect().execution_options(writes=True) as connection, connection.begin():
            if self.engine.dialect.name == "postgresql":  # sqlite's BEGIN IMMEDIATE does the same
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7205759403792793)")
            yield connection


def _mark(connection: Connection, name: str) -> str:
    return str(connection.execute(select(tables.marks.c.value).filter_by(name=name)).scalar_one())


def _set_mark(connection: Connection, name: str, value: str) -> None:
    connection.execute(update(tables.marks).filter_by(name=name).values(value=value))


def _end_job(connection: Connection, name: str, state: str, result: dict[str, Any]) -> None:
    connection.execute(update(tables.jobs).filter_by(id=name).values(state=state, result=canonical(result)))

"""Is the ledger what was written? The chain of its entries, and every table that follows from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select

from malmen.serve.ledger import tables
from malmen.serve.ledger.chain import GENESIS, Entry, first_break
from malmen.serve.ledger.tables import BASE, LIVE

_AT_ONCE = 1000


@dataclass
class Told:
    """What the entries, read from the first on, say that the tables hold."""

    edits: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, Any] = field(default_factory=dict)

    def read(self, entry: Entry) -> None:
        """One more entry."""
        body = entry.body
        if entry.kind == "begin":
            self.versions[body["version"]] = (None, None)
            self.aliases.update(dict.fromkeys((BASE, LIVE), (body["version"], 1)))
        elif entry.kind == "alias":
            self.aliases[body["name"]] = (body["version"], body["revision"])
        else:
            version = body["version"]
            if version not in self.versions:  # the first of the requests that this version came of
                self.versions[version] = (body["parent"], body["shifts"])
                self.aliases[LIVE] = (version, self.aliases[LIVE][1] + 1)
            for name, *fact in body["added"]:
                self.edits[name] = (*fact, version)
                self.changes[f"{version} {name}"] = "added"
            self.changes.update({f"{version} {name}": how for name, how in body["ended"]})

    @classmethod
    def found(cls, connection: Connection) -> Told:
        """What the tables do hold."""
        ask = lambda table: connection.execute(select(table))  # noqa: E731
        return cls(
            {row.id: (row.prompt, row.answer, row.rows, row.position, row.version) for row in ask(tables.edits)},
            {f"{row.version} {row.edit}": row.kind for row in ask(tables.changes)},
            {row.id: (row.parent, row.shifts) for row in ask(tables.versions)},
            {row.name: (row.version, row.revision) for row in ask(tables.aliases)},
        )

    def differences(self, other: Told) -> dict[str, list[str]]:
        """By table, the names of the rows that differ; at most 20 of each."""
        found = {}
        for table, here in vars(self).items():
            there = getattr(other, table)
            names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
            if names:
                found[table] = names[:20]
        return found


def verify(connection: Connection) -> dict[str, Any]:
    """Look at all of it; `connection` must see one state of the database throughout."""
    count, previous, told = 0, GENESIS, Told()
    for some in _parts(connection):
        broken = first_break(some, previous, count)
        if broken is not None:
            return {"intact": False, "entries": count, "broken_at": broken}
        for entry in some:
            told.read(entry)
        count, previous = some[-1].seq + 1, some[-1].hash
    head = connection.execute(select(tables.marks.c.value).filter_by(name="head")).scalar_one()
    differing = told.differences(Told.found(connection))
    if differing or head != f"{count - 1} {previous}":
        return {"intact": False, "entries": count, "broken_at": None, "differing": differing}
    return {"intact": True, "entries": count, "head": previous}


def _parts(connection: Connection) -> Iterator[list[Entry]]:
    after = -1
    while True:
        query = select(tables.entries).where(tables.entries.c.seq > after).order_by(tables.entries.c.seq)
        rows = connection.execute(query.limit(_AT_ONCE)).mappings().all()
        if not rows:
            return
        yield [Entry(**{**row, "body": _body(row["body"])}) for row in rows]
        after = rows[-1]["seq"]


def _body(text: str) -> dict[str, Any]:
    """What is no JSON any more is no entry that was written: its hash will not fit."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return {"unreadable": text}

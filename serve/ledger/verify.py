"""Verify the ledger: the chain of its entries, and every table against what the entries say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select

from malmen.serve.ledger import tables
from malmen.serve.ledger.chain import GENESIS, Entry, is_intact
from malmen.serve.ledger.tables import BASE, LIVE

_MAX_NAMES = 20  # of differing rows, for each table


@dataclass
class Contents:
    """What the tables hold: by table, the rows by name."""

    edits: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, Any] = field(default_factory=dict)

    def replay(self, entry: Entry) -> None:
        """Apply the next entry."""
        body = entry.body
        if entry.kind == "begin":
            self.versions[body["version"]] = (None, None)
            self.aliases.update(dict.fromkeys((BASE, LIVE), (body["version"], 1)))
        elif entry.kind == "alias":
            self.aliases[body["name"]] = (body["version"], body["revision"])
        else:
            version = body["version"]
            if version not in self.versions:  # the first of the changes that make up this version
                self.versions[version] = (body["parent"], body["shifts"])
                self.aliases[LIVE] = (version, self.aliases[LIVE][1] + 1)
            for name, *fact in body["added"]:
                self.edits[name] = (*fact, version)
                self.changes[f"{version} {name}"] = "added"
            self.changes.update({f"{version} {name}": how for name, how in body["ended"]})

    @classmethod
    def of_tables(cls, connection: Connection) -> Contents:
        """The tables as they are."""
        rows = lambda table: connection.execute(select(table))  # noqa: E731
        return cls(
            {row.id: (row.prompt, row.answer, row.rows, row.position, row.version) for row in rows(tables.edits)},
            {f"{row.version} {row.edit}": row.kind for row in rows(tables.changes)},
            {row.id: (row.parent, row.shifts) for row in rows(tables.versions)},
            {row.name: (row.version, row.revision) for row in rows(tables.aliases)},
        )

    def differences(self, other: Contents) -> dict[str, list[str]]:
        """By table, the names of the rows that differ; at most 20 of each."""
        differing = {}
        for table, mine in vars(self).items():
            theirs = getattr(other, table)
            if names := sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)):
                differing[table] = names[:_MAX_NAMES]
        return differing


def verify(connection: Connection) -> dict[str, Any]:
    """`intact` and what belongs to it; `connection` must see one snapshot of the database throughout."""
    count, previous, expected = 0, GENESIS, Contents()
    query = select(tables.entries).order_by(tables.entries.c.seq).execution_options(yield_per=1000)
    for row in connection.execute(query).mappings():
        entry = Entry(**row)
        if not is_intact(entry, previous, count):
            return {"intact": False, "entries": count, "broken_at": count}
        expected.replay(entry)
        count, previous = count + 1, entry.hash
    head = connection.execute(select(tables.marks.c.value).filter_by(name="head")).scalar_one()
    differing = expected.differences(Contents.of_tables(connection))
    if differing or head != f"{count - 1} {previous}":
        return {"intact": False, "entries": count, "broken_at": None, "differing": differing}
    return {"intact": True, "entries": count, "head": previous}

"""Verification: whatever is changed in the database is detected."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from publications import make_publication

from malmen.serve.ledger.ledger import Ledger


@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE entries SET body = replace(body, 'yes', 'no') WHERE seq = 1",
        "UPDATE entries SET actor = 'eve' WHERE seq = 1",
        "UPDATE entries SET body = 'no JSON' WHERE seq = 1",
        "DELETE FROM entries WHERE seq = 1",
        "DELETE FROM entries WHERE seq = 2",
        "UPDATE edits SET answer = 'no' WHERE id = 'e1-0'",
        "DELETE FROM edits WHERE id = 'e1-0'",
        "UPDATE versions SET shifts = 'another' WHERE number = 1",
        "UPDATE versions SET parent = NULL WHERE number = 2",
        "DELETE FROM versions WHERE number = 1",
        "UPDATE changes SET kind = 'removed' WHERE edit = 'e1-0'",
        "DELETE FROM changes WHERE edit = 'e1-0'",
        "UPDATE aliases SET version = (SELECT id FROM versions WHERE number = 1) WHERE name = 'live'",
    ],
)
def test_tampering_shows(tmp_path: Path, tampering: str) -> None:
    file = tmp_path / "ledger.db"
    ledger = Ledger(f"sqlite:///{file}", "model", "editor")
    epoch = ledger.take_over()
    ledger.publish(*make_publication(ledger, 1, "a"), epoch)
    ledger.publish(*make_publication(ledger, 2, "b"), epoch)
    assert ledger.verify()["intact"]
    with sqlite3.connect(file) as connection:
        connection.execute(tampering)
    assert not ledger.verify()["intact"]
    ledger.close()


def test_a_ledger_whose_aliases_were_moved_is_intact(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    ledger.publish(*make_publication(ledger, 1, "a"), epoch)
    live = ledger.alias("live")
    ledger.set_alias("live", ledger.resolve("base").id, live.revision, "ann")
    ledger.set_alias("tested", live.version, None, "ann")
    ledger.publish(*make_publication(ledger, 2, "b"), epoch)
    assert ledger.verify()["intact"]
    ledger.close()

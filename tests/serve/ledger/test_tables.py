"""The ledger's database."""

from __future__ import annotations

from pathlib import Path

import pytest

from malmen.errors import UsageError
from malmen.serve.ledger import tables
from malmen.serve.ledger.tables import open_engine


@pytest.mark.parametrize("given", ["mysql://here/there", "nonsense"])
def test_only_databases_that_are_tested_are_taken(given: str) -> None:
    with pytest.raises(UsageError):
        open_engine(given)


def test_json_is_stored_as_canonical_text_and_text_that_is_none_is_still_read(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'ledger.db'}")
    row = {"actor": "ann", "key": "k", "request": "hash", "reply": {"b": [1], "a": "é"}}
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        tables.metadata.create_all(connection)
        connection.execute(tables.replays.insert().values(**row))
        assert connection.exec_driver_sql("SELECT reply FROM replays").scalar() == '{"a":"é","b":[1]}'
        assert connection.execute(tables.replays.select()).mappings().one() == row
        connection.exec_driver_sql("UPDATE replays SET reply = 'no JSON'")
        assert connection.execute(tables.replays.select()).mappings().one()["reply"] == {"unreadable": "no JSON"}
    engine.dispose()

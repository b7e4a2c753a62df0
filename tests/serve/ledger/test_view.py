"""Reading the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from publications import make_publication

from malmen.serve.ledger.ledger import Ledger
from malmen.serve.problems import Problem


def test_versions_that_were_rolled_back_are_no_ancestors_of_what_comes_after(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    for number, prompt in ((1, "a"), (2, "b")):
        ledger.publish(*make_publication(ledger, number, prompt), epoch)
    one, two = f"v{1:016d}", f"v{2:016d}"
    ledger.set_alias("live", one, ledger.alias("live").revision, "ann")
    ledger.publish(*make_publication(ledger, 3, "c"), epoch)
    three = ledger.resolve("live").id
    assert ledger.members(three) == {"e1-0", "e3-0"}
    assert one in ledger.ancestry(three) and two not in ledger.ancestry(three) and two in ledger.ancestry(two)
    ledger.close()


def test_a_database_that_is_gone_is_told_as_such_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    ledger = Ledger(f"sqlite:///{folder / 'ledger.db'}", "model", "editor")
    ledger.close()
    folder.rename(tmp_path / "away")
    with pytest.raises(Problem) as problem:
        ledger.resolve("live")
    assert problem.value.status == 503
    (tmp_path / "away").rename(folder)
    assert ledger.resolve("live").number == 0
    ledger.close()

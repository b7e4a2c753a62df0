"""The ledger: durable, chained, one writer, on sqlite and on PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from malmen.errors import EditError, UsageError
from malmen.serve.ledger.ledger import AcceptedChange, Ledger, NewEdit, Publication
from malmen.serve.ledger.tables import open_engine
from malmen.serve.messages import Change, EditReply, GuardReport, Receipt
from malmen.serve.problems import Problem

BLOB = "ab" * 32


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    fresh: Callable[[], str] = request.getfixturevalue("fresh_postgres")
    return fresh()


def reply(number: int) -> EditReply:
    return EditReply(
        version=f"v{number:016d}", number=number, parent=None, dry_run=False, edits=[], removed=[], num_facts=number,
        guard=GuardReport(),
    )  # fmt: skip


def publication(ledger: Ledger, number: int, *prompts: str, ended: tuple[str, ...] = (), key: str | None = None):
    live = ledger.alias("live")
    added = tuple(NewEdit(f"e{number}-{at}", prompt, "yes", BLOB, at, {}) for at, prompt in enumerate(prompts))
    removed = tuple((name, "removed") for name in ended)
    accepted = AcceptedChange(Change("ann", remove=ended, key=key), added, removed, reply(number))
    members = len(ledger.members(live.version)) + len(added) - len(ended)
    return Publication(f"v{number:016d}", number, live.version, live.revision, BLOB, members, {}, (accepted,))


def test_what_was_published_is_there_after_a_restart(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    ledger.publish(publication(ledger, 1, "a", "b", key="k"), epoch)
    ledger.publish(publication(ledger, 2, "c", ended=("e1-0",)), epoch)
    ledger.close()
    again = Ledger(url, "model", "editor")
    assert again.members(again.resolve("live").id) == {"e1-1", "e2-0"}
    assert again.members("v" + f"{1:016d}") == {"e1-0", "e1-1"}
    assert [edit.id for edit in again.edits()] == ["e2-0", "e1-1", "e1-0"]
    assert again.ended(["e1-0", "e1-1"]) == {"e1-0": [(f"v{2:016d}", "removed")]}
    assert again.replay(Change("ann", key="k")) == Receipt(reply(1), replayed=True)
    assert again.replay(Change("bob", key="k")) is None and again.replay(Change("ann")) is None
    other = again.replay(Change("ann", remove=("e1-1",), key="k"))
    assert isinstance(other, Problem) and other.status == 422
    assert again.resolve("base").num_facts == 0 and again.resolve("live").number == 2
    assert again.verify() == {"intact": True, "entries": 3, "head": again.audit()[-1].hash}
    again.close()


def test_a_publication_is_there_whole_or_not_at_all(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    ledger.publish(publication(ledger, 1, "a"), epoch)
    doubled = publication(ledger, 2, "b", "c")
    doubled = Publication(**{**vars(doubled), "version": f"v{1:016d}"})  # fails at its last row
    with pytest.raises(Problem) as problem:
        ledger.publish(doubled, epoch)
    assert problem.value.status == 409
    assert [edit.prompt for edit in ledger.edits()] == ["a"]
    assert ledger.resolve("live").number == 1 and ledger.verify()["intact"]
    ledger.close()


def test_two_writers_cannot_both_publish(url: str) -> None:
    one, other = Ledger(url, "model", "editor"), Ledger(url, "model", "editor")
    first = one.take_over()
    second = other.take_over()
    assert second > first
    with pytest.raises(Problem, match="another writer"):
        one.publish(publication(one, 1, "a"), first)
    other.publish(publication(other, 1, "a"), second)
    one.close(), other.close()


def test_a_publication_on_a_version_that_is_no_longer_live_is_refused(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    late = publication(ledger, 2, "late")
    ledger.publish(publication(ledger, 1, "a"), epoch)
    with pytest.raises(Problem, match="no longer points"):
        ledger.publish(late, epoch)
    ledger.close()


def test_an_alias_moves_only_for_who_has_seen_where_it_is(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    base = ledger.resolve("base").id
    made = ledger.set_alias("stable", base, None, "ann")
    assert made.revision == 1
    for revision, status in ((None, 428), (7, 412)):
        with pytest.raises(Problem) as problem:
            ledger.set_alias("stable", base, revision, "ann")
        assert problem.value.status == status
    assert ledger.set_alias("stable", base, 1, "ann").revision == 2
    for name, version, status in (("base", base, 409), ("stable", "v0", 404)):
        with pytest.raises(Problem) as problem:
            ledger.set_alias(name, version, 2, "ann")
        assert problem.value.status == status
    with pytest.raises(Problem, match="aliases: base, live, stable"):
        ledger.resolve("nowhere")
    ledger.close()


def test_versions_that_were_rolled_back_are_no_ancestors_of_what_comes_after(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    for number, prompt in ((1, "a"), (2, "b")):
        ledger.publish(publication(ledger, number, prompt), epoch)
    one, two = f"v{1:016d}", f"v{2:016d}"
    ledger.set_alias("live", one, ledger.alias("live").revision, "ann")
    ledger.publish(publication(ledger, 3, "c"), epoch)
    three = ledger.resolve("live").id
    assert ledger.members(three) == {"e1-0", "e3-0"}
    assert one in ledger.ancestry(three) and two not in ledger.ancestry(three) and two in ledger.ancestry(two)
    ledger.close()


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
    ledger.publish(publication(ledger, 1, "a"), epoch)
    ledger.publish(publication(ledger, 2, "b"), epoch)
    assert ledger.verify()["intact"]
    with sqlite3.connect(file) as connection:
        connection.execute(tampering)
    assert not ledger.verify()["intact"]
    ledger.close()


def test_a_ledger_whose_aliases_were_moved_is_intact(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    ledger.publish(publication(ledger, 1, "a"), epoch)
    live = ledger.alias("live")
    ledger.set_alias("live", ledger.resolve("base").id, live.revision, "ann")
    ledger.set_alias("tested", live.version, None, "ann")
    ledger.publish(publication(ledger, 2, "b"), epoch)
    assert ledger.verify()["intact"]
    ledger.close()


def test_a_ledger_of_another_editor_or_model_is_refused(url: str) -> None:
    Ledger(url, "model", "editor").close()
    with pytest.raises(EditError, match="belongs to another editor or base model"):
        Ledger(url, "model", "other")


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


@pytest.mark.parametrize("given", ["mysql://here/there", "nonsense"])
def test_only_databases_that_are_tested_are_taken(given: str) -> None:
    with pytest.raises(UsageError):
        open_engine(given)

"""The ledger: durable, chained, one writer, on sqlite and on PostgreSQL."""

from __future__ import annotations

from dataclasses import replace

import pytest
from publications import make_publication, make_reply

from malmen.errors import EditError
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.messages import Change, Receipt
from malmen.serve.problems import Problem


def test_what_was_published_is_there_after_a_restart(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    ledger.publish(*make_publication(ledger, 1, "a", "b", key="k"), epoch)
    ledger.publish(*make_publication(ledger, 2, "c", ended=("e1-0",)), epoch)
    ledger.close()
    again = Ledger(url, "model", "editor")
    assert again.members(again.resolve("live").id) == {"e1-1", "e2-0"}
    assert again.members("v" + f"{1:016d}") == {"e1-0", "e1-1"}
    assert [edit.id for edit in again.edits()] == ["e2-0", "e1-1", "e1-0"]
    assert again.ended(["e1-0", "e1-1"]) == {"e1-0": [(f"v{2:016d}", "removed")]}
    assert again.replay(Change("ann", key="k")) == Receipt(make_reply(1), replayed=True)
    assert again.replay(Change("bob", key="k")) is None and again.replay(Change("ann")) is None
    other = again.replay(Change("ann", remove=("e1-1",), key="k"))
    assert isinstance(other, Problem) and other.status == 422
    assert again.resolve("base").num_facts == 0 and again.resolve("live").number == 2
    assert again.verify() == {"intact": True, "entries": 3, "head": again.audit()[-1].hash}
    again.close()


def test_a_publication_is_there_whole_or_not_at_all(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    ledger.publish(*make_publication(ledger, 1, "a"), epoch)
    doubled = make_publication(ledger, 2, "b", "c")
    doubled = (replace(doubled[0], id=f"v{1:016d}"), *doubled[1:])  # fails at its last row
    with pytest.raises(Problem) as problem:
        ledger.publish(*doubled, epoch)
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
        one.publish(*make_publication(one, 1, "a"), first)
    other.publish(*make_publication(other, 1, "a"), second)
    one.close(), other.close()


def test_a_publication_on_a_version_that_is_no_longer_live_is_refused(url: str) -> None:
    ledger = Ledger(url, "model", "editor")
    epoch = ledger.take_over()
    late = make_publication(ledger, 2, "late")
    ledger.publish(*make_publication(ledger, 1, "a"), epoch)
    with pytest.raises(Problem, match="no longer points"):
        ledger.publish(*late, epoch)
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


def test_a_ledger_of_another_editor_or_model_is_refused(url: str) -> None:
    Ledger(url, "model", "editor").close()
    with pytest.raises(EditError, match="belongs to another editor or base model"):
        Ledger(url, "model", "other")

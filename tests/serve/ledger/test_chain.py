"""The chain of entries: one hash for one content, and any change breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from malmen.serve.ledger.chain import GENESIS, Entry, canonical, chain_entry, is_intact


def find_break(entries: Sequence[Entry], previous: str = GENESIS, seq: int = 0) -> int | None:
    hashes = [previous, *(entry.hash for entry in entries)]
    places = enumerate(zip(entries, hashes, strict=False), seq)
    return next((place for place, (entry, before) in places if not is_intact(entry, before, place)), None)


@pytest.fixture
def entries() -> list[Entry]:
    chain: list[Entry] = []
    for seq in range(4):
        previous = chain[-1].hash if chain else GENESIS
        chain.append(chain_entry(seq, "2026-01-01T00:00:00.000Z", "ann", "edit", {"number": seq}, previous))
    return chain


def test_the_text_of_a_value_does_not_depend_on_the_order_of_its_keys() -> None:
    assert canonical({"b": 1, "a": ["é"]}) == canonical({"a": ["é"], "b": 1}) == '{"a":["é"],"b":1}'


def test_a_chain_as_it_was_written_has_no_break_and_can_be_checked_in_parts(entries: list[Entry]) -> None:
    assert find_break(entries) is None
    assert find_break(entries[2:], entries[1].hash, 2) is None


@pytest.mark.parametrize("change", [{"actor": "eve"}, {"at": "2027"}, {"kind": "alias"}, {"body": {}}, {"hash": "0"}])
def test_a_changed_entry_breaks_the_chain_where_it_stands(entries: list[Entry], change: dict[str, object]) -> None:
    entries[2] = replace(entries[2], **change)
    assert find_break(entries) == 2


def test_an_entry_that_is_missing_or_rehashed_breaks_the_chain(entries: list[Entry]) -> None:
    assert find_break([*entries[:1], *entries[2:]]) == 1
    forged = chain_entry(1, entries[1].at, "eve", "edit", {}, entries[0].hash)
    assert find_break([entries[0], forged, *entries[2:]]) == 2

"""What is edited: a fact, the record of what must and must not change with it, and which records go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FactKind = Literal["edit", "equivalent", "unrelated", "portability", "reversal"]


@dataclass(frozen=True)
class Fact:
    """A prompt–answer tuple (x, y)."""

    prompt: str
    answer: str
    subject: str | None = field(default=None, compare=False)  # what it is about, as it stands in the prompt


@dataclass(frozen=True)
class EditRecord:
    """An edit with samples of its equivalents E(x, y) and of unrelated tuples U(x, y)  (§3).

    The other fields go beyond the paper: they are measured where they exist, and nothing is trained on them.
    """

    edit: Fact
    equivalents: tuple[Fact, ...] = ()
    unrelated: tuple[Fact, ...] = ()
    id: str = ""
    portability: tuple[Fact, ...] = ()  # what follows from the edit
    reversal: tuple[Fact, ...] = ()  # the edit asked from its answer
    neighbours: tuple[str, ...] = ()  # prompts next to the edit, after which the unedited model's text is to stay


def compatible_records(records: Sequence[EditRecord], number: int) -> list[EditRecord]:
    """The first `number` records of which no two edit the same prompt."""
    chosen: dict[str, EditRecord] = {}
    for record in records:
        if len(chosen) == number:
            break
        chosen.setdefault(record.edit.prompt, record)
    return list(chosen.values())


def facts_by_kind(records: Sequence[EditRecord]) -> dict[FactKind, list[Fact]]:
    """All facts of the records that are edited together, as the paper's metrics count them."""
    edits = {record.edit.prompt for record in records}
    return {
        "edit": [record.edit for record in records],
        "equivalent": [fact for record in records for fact in record.equivalents],
        "unrelated": [fact for unrelated in unrelated_to_all(records) for fact in unrelated],
        "portability": [fact for record in records for fact in record.portability if fact.prompt not in edits],
        "reversal": [fact for record in records for fact in record.reversal if fact.prompt not in edits],
    }


def unrelated_to_all(records: Sequence[EditRecord], edited: Sequence[EditRecord] | None = None) -> list[list[Fact]]:
    """Each record's unrelated tuples without those that another record edits: ∩ U(x_i, y_i), eq. 1. `edited`: the
    records that are edited, if they are more than these."""
    touched = {fact.prompt for record in edited or records for fact in (record.edit, *record.equivalents)}
    return [[fact for fact in record.unrelated if fact.prompt not in touched] for record in records]


def neighbours_of_all(records: Sequence[EditRecord]) -> list[str]:
    """The records' neighbours, once each, without those that any record changes."""
    changed = {
        fact.prompt
        for record in records
        for fact in (record.edit, *record.equivalents, *record.portability, *record.reversal)
    }
    return list(dict.fromkeys(prompt for record in records for prompt in record.neighbours if prompt not in changed))

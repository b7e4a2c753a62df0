"""What is edited: a fact, the record of what must and must not change with it, and which records go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fact:
    """A prompt–answer tuple (x, y)."""

    prompt: str
    answer: str
    subject: str | None = field(default=None, compare=False)  # what it is about, as it stands in the prompt


@dataclass(frozen=True)
class EditRecord:
    """An edit with samples of its equivalents E(x, y) and of unrelated tuples U(x, y)  (§3)."""

    edit: Fact
    equivalents: tuple[Fact, ...] = ()
    unrelated: tuple[Fact, ...] = ()
    id: str = ""


def compatible_records(records: Sequence[EditRecord], number: int) -> list[EditRecord]:
    """The first `number` records of which no two edit the same prompt."""
    chosen: dict[str, EditRecord] = {}
    for record in records:
        if len(chosen) == number:
            break
        chosen.setdefault(record.edit.prompt, record)
    return list(chosen.values())


def unrelated_to_all(records: Sequence[EditRecord], edited: Sequence[EditRecord] | None = None) -> list[list[Fact]]:
    """Each record's unrelated tuples without those that another record edits: ∩ U(x_i, y_i), eq. 1. `edited`: the
    records that are edited, if they are more than these."""
    touched = {fact.prompt for record in edited or records for fact in (record.edit, *record.equivalents)}
    return [[fact for fact in record.unrelated if fact.prompt not in touched] for record in records]

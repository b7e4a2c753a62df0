"""What is edited: a fact, and the record that says what must follow from it and what must not."""

from __future__ import annotations

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
    id: str = field(default="")

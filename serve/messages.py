"""What the API asks of the writer and the readers, in plain values that travel between processes.

Nothing here needs torch, so that an ingress is small and is there again quickly after it was lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from malmen.data.records import EditRecord, Fact
from malmen.serve.http.problems import Problem
from malmen.serve.ledger.chain import canonical, digest

if TYPE_CHECKING:
    from malmen.edit_set import FactRows
    from malmen.export import ExportKind

Outcome = dict[str, Any] | Problem  # what a request is answered


@dataclass(frozen=True)
class Change:
    """One request: facts that shall hold, corrections to be taken back, or both; all of it or nothing."""

    actor: str
    facts: tuple[Fact, ...] = ()
    remove: tuple[str, ...] = ()
    key: str | None = None  # the caller's: the same key again gives the same reply and does nothing twice
    dry_run: bool = False
    base_version: str | None = None  # only if this is what is live now
    job: str | None = None
    rows: FactRows | None = field(default=None, compare=False)  # of the facts, where they were computed before

    def fingerprint(self) -> str:
        """A hash of what is asked, to tell a repeated request from another one with the same key."""
        facts = [[fact.prompt, fact.answer] for fact in self.facts]
        return digest(canonical([facts, list(self.remove), self.dry_run, self.base_version]))


@dataclass(frozen=True)
class Sampling:
    """How one answer is drawn; temperature 0 takes the most probable token."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt for one version of the model."""

    text: str
    shifts: str | None  # the version's blob; None: the unedited model
    sampling: Sampling
    verbatim: bool = False  # the text is what the model reads, chat template and all


class Roles(Protocol):
    """The writer and the readers, wherever they are."""

    async def edit(self, change: Change) -> dict[str, Any]:
        """Ask the writer."""

    async def wake(self) -> None:
        """Tell the writer that there is a job."""

    async def export(self, version: str, kind: ExportKind, max_rank: int) -> dict[str, Any]:
        """Have the writer export a version."""

    async def complete(self, prompt: Prompt) -> dict[str, Any]:
        """Ask a reader."""

    def stream(self, prompt: Prompt) -> AsyncIterator[dict[str, Any]]:
        """Ask a reader and see the answer grow."""

    async def chat_text(self, turns: list[dict[str, str]]) -> dict[str, Any]:
        """A chat's `text` as the model reads it, and whether it is `verbatim` what its chat template made."""

    async def evaluate(self, records: Sequence[EditRecord], shifts: str | None, generate: bool) -> dict[str, Any]:
        """Have a reader measure a version."""

    async def status(self) -> dict[str, Any]:
        """Who is alive."""


def unwrapped(outcome: Outcome) -> dict[str, Any]:
    """Outcomes travel as values; here a problem is raised."""
    if isinstance(outcome, Problem):
        raise outcome
    return outcome

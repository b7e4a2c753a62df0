"""What the endpoint's processes say to each other: requests to the writer and to the readers, and their replies.

Each request's type names its reply, so one call carries them all. Nothing here needs torch: an ingress stays small,
and is back quickly after it was lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel, Field

from malmen.data.records import EditRecord, Fact
from malmen.serve.problems import Problem

if TYPE_CHECKING:
    from malmen.edit_set import FactRows
    from malmen.export import ExportKind

Reply = TypeVar("Reply")
ReplyType = TypeVar("ReplyType", covariant=True)


class WriterRequest(Generic[ReplyType]):
    """For the one writer."""

    @property
    def repeatable(self) -> bool:
        """Whether it may be sent again when the writer dies before it answers."""
        return False


class ReaderRequest(Generic[ReplyType]):
    """For any reader; it changes nothing, so it may be sent again when a reader dies."""

    repeatable = True


# --- edits -----------------------------------------------------------------------------------------------


class FactResult(BaseModel):
    """What became of one fact."""

    index: int
    id: str | None
    status: Literal["added", "unchanged"]
    supersedes: str | None
    holds: bool = Field(description="whether each token of the answer is the most probable one")
    tokens_right: int
    tokens: int


class GuardReport(BaseModel):
    """What was measured before publishing."""

    max_shift_ratio: float | None = None
    perplexity_ratio: float | None = None


class EditReply(BaseModel):
    """A published version; for a dry run, what it would be."""

    version: str | None
    number: int | None
    parent: str | None
    dry_run: bool
    edits: list[FactResult]
    removed: list[str]
    num_facts: int
    guard: GuardReport

    @property
    def num_added(self) -> int:
        """How many facts are new."""
        return sum(result.status == "added" for result in self.edits)


@dataclass(frozen=True)
class Receipt:
    """The reply to a change that was carried out, now or by an earlier request with the same key."""

    reply: EditReply
    replayed: bool = False


Outcome = Receipt | Problem


@dataclass(frozen=True)
class Change(WriterRequest[Receipt]):
    """Facts to add, edits to remove, or both: all of it or nothing."""

    actor: str
    facts: tuple[Fact, ...] = ()
    remove: tuple[str, ...] = ()
    key: str | None = None  # the caller's: the same key again gives the same reply and changes nothing
    dry_run: bool = False
    base_version: str | None = None  # only if this version is live
    job: str | None = None
    rows: FactRows | None = field(default=None, compare=False)  # of the facts, where a job has traced them

    @property
    def repeatable(self) -> bool:
        """With a key, a change that was carried out is not carried out again."""
        return self.key is not None

    @property
    def size(self) -> int:
        """How many facts are to be added or removed."""
        return len(self.facts) + len(self.remove)

    def request(self) -> dict[str, Any]:
        """What is asked, as JSON: it tells a repeated request from another one with the same key."""
        facts = [[fact.prompt, fact.answer] for fact in self.facts]
        rest = {"dry_run": self.dry_run, "base_version": self.base_version}
        return {"facts": facts, "remove": list(self.remove), **rest}


@dataclass(frozen=True)
class WakeJobs(WriterRequest[None]):
    """A job was recorded."""


@dataclass(frozen=True)
class Export(WriterRequest[dict[str, Any]]):
    """Write a version as files; the reply is their manifest."""

    version: str
    kind: ExportKind
    max_rank: int


# --- answers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerState:
    """An answer so far."""

    text: str
    finish_reason: str | None  # stop or length, once it has ended
    prompt_tokens: int
    completion_tokens: int
    reader: str | None = None  # the replica that answered


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn; temperature 0 takes the most probable token."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Prompt(ReaderRequest[AnswerState]):
    """A prompt for one version of the model."""

    content: str | list[dict[str, str]]  # a text, or the turns of a chat, each with `role` and `content`
    shifts: str | None  # the version's blob; None: the unedited model
    sampling: Sampling


class Scores(BaseModel):
    """An evaluation: ES, GS, LS and related scores by name, and a row for every fact."""

    scores: dict[str, float | int | None]
    facts: list[dict[str, Any]]


@dataclass(frozen=True)
class Evaluate(ReaderRequest[Scores]):
    """Measure a version beside the unedited model."""

    records: list[EditRecord]
    shifts: str | None
    generate: bool


@dataclass(frozen=True)
class CountVersions(ReaderRequest[int]):
    """How many versions a reader has in memory."""


# --- the other side --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerStatus:
    """Which workers are alive."""

    writer_alive: bool
    readers: int  # replicas, including those that are starting
    readers_running: int
    versions_in_memory: int  # of one reader


class Workers(Protocol):
    """The writer and the readers, wherever they are. A refusal is raised as a Problem."""

    async def ask_writer(self, request: WriterRequest[Reply]) -> Reply:
        """Send a request to the writer."""

    async def ask_reader(self, request: ReaderRequest[Reply]) -> Reply:
        """Send a request to a reader."""

    def stream(self, prompt: Prompt) -> AsyncIterator[AnswerState]:
        """The states of an answer as it grows."""

    async def status(self) -> WorkerStatus:
        """Which workers are alive."""


def reply_or_raise(outcome: Reply | Problem) -> Reply:
    """Problems travel between processes as values; here one is raised."""
    if isinstance(outcome, Problem):
        raise outcome
    return outcome

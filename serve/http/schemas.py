"""The bodies of requests and responses. Unknown members of a request are errors: a misspelt `dry_run` must not publish.

`malmen.serve.messages` has those that the writer returns.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from malmen.data.records import EditRecord, Fact
from malmen.serve.ledger.tables import Alias
from malmen.serve.messages import EditReply, GuardReport, Scores


def plain_text(text: str) -> str:
    """The text, if tokenizers and databases can hold it."""
    if "\x00" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text contains a zero byte or half a surrogate pair")
    return text


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), AfterValidator(plain_text)]
PromptText = Annotated[str, StringConstraints(min_length=1), AfterValidator(plain_text)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
EditId = Annotated[str, StringConstraints(pattern=r"^e[0-9a-f]{20}$")]


class RequestBody(BaseModel):
    """JSON that callers send."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FactIn(RequestBody):
    """A prompt and its new answer."""

    prompt: Text = Field(examples=["Which instrument does Karel Corkstein play?"])
    answer: Text = Field(examples=["banjo"])

    def fact(self) -> Fact:
        """As the editor's record."""
        return Fact(self.prompt, self.answer)


class EditsIn(RequestBody):
    """Facts to add and edits to remove: all of it or nothing."""

    facts: list[FactIn] = Field(default=[], description="facts to add, all in one version")
    remove: list[EditId] = Field(default=[], description="ids of edits to remove in the same version")
    dry_run: bool = Field(default=False, description="compute and measure, but publish nothing")
    base_version: Name | None = Field(default=None, description="only if this version is live; else 409")


class JobOut(BaseModel):
    """A large change, carried out in the background."""

    id: str
    state: Literal["queued", "running", "done", "failed"]
    done: int
    total: int
    result: EditReply | None = None
    problem: dict[str, Any] | None = None


class EditOut(BaseModel):
    """An edit, and its state in the live version."""

    id: str
    number: int
    prompt: str
    answer: str
    state: Literal["live", "removed", "superseded", "rolled_back"]
    version: str
    actor: str
    at: str
    holds: bool
    tokens_right: int
    tokens: int


class EditList(BaseModel):
    """A page of edits, the newest first."""

    edits: list[EditOut]
    next: int | None = Field(description="the value of `before` for the next page")


class VersionOut(BaseModel):
    """An immutable state of the model."""

    id: str
    number: int
    parent: str | None
    num_facts: int
    actor: str
    at: str
    aliases: list[str]
    guard: GuardReport


class EndedEdit(EditOut):
    """An edit that a version removed or superseded."""

    how: Literal["removed", "superseded"]


class VersionDetail(VersionOut):
    """A version and what it changed."""

    added: list[EditOut]
    ended: list[EndedEdit]


class VersionList(BaseModel):
    """A page of versions, the newest first."""

    versions: list[VersionOut]
    next: int | None


class AliasIn(RequestBody):
    """The new target of an alias."""

    version: Name


class AliasList(BaseModel):
    """All aliases."""

    aliases: list[Alias]


class RecordIn(FactIn):
    """An edit with rephrasings, which must follow it, and unrelated facts, which must not change."""

    rephrasings: list[Text] = []
    unrelated: list[FactIn] = []

    def texts(self) -> list[str]:
        """All texts that a model reads for it."""
        unrelated = (text for fact in self.unrelated for text in (fact.prompt, fact.answer))
        return [self.prompt, self.answer, *self.rephrasings, *unrelated]

    def num_facts(self) -> int:
        """How many prompts a model answers for it."""
        return 1 + len(self.rephrasings) + len(self.unrelated)

    def record(self) -> EditRecord:
        """As the evaluation's record."""
        return EditRecord(
            self.fact(),
            tuple(Fact(prompt, self.answer) for prompt in self.rephrasings),
            tuple(fact.fact() for fact in self.unrelated),
        )


class EvaluateIn(RequestBody):
    """Records on which to measure a version."""

    records: list[RecordIn] = Field(min_length=1)
    version: Name = "live"
    generate: bool = Field(default=True, description="also compare freely generated answers")


class EvaluateOut(Scores):
    """The scores of a version, and every fact before and after."""

    version: str


class ExportIn(RequestBody):
    """How to export a version."""

    kind: Literal["delta", "lora", "merged"] = "delta"
    max_rank: int = Field(
        default=512, ge=1, le=4096, description="of a LoRA; above it the LoRA is truncated, and its error stated"
    )


class ExportOut(BaseModel):
    """The files of an export."""

    version: str
    kind: str
    files: dict[str, str] = Field(description="addresses by file name")
    manifest: dict[str, Any]


class AuditOut(BaseModel):
    """Entries of the ledger, the oldest first."""

    entries: list[dict[str, Any]]
    next: int | None
    intact: bool | None = Field(description="whether nothing was changed since; null without `verify`")


class ProblemOut(BaseModel):
    """A problem document (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str

"""What the API takes and gives. Unknown members are errors: a misspelt `dry_run` must not publish."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from malmen.data.records import EditRecord, Fact


def plain_text(text: str) -> str:
    """What no tokenizer or database can hold is refused at the door."""
    if "\x00" in text or any("\ud800" <= sign <= "\udfff" for sign in text):
        raise ValueError("the text holds a zero byte or half a character")
    return text


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), AfterValidator(plain_text)]
Prompted = Annotated[str, StringConstraints(min_length=1), AfterValidator(plain_text)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
EditId = Annotated[str, StringConstraints(pattern=r"^e[0-9a-f]{20}$")]
KEY_PATTERN = r"^[\x21-\x7e]{1,200}$"


class Asked(BaseModel):
    """Part of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Told(BaseModel):
    """Part of a reply."""

    model_config = ConfigDict(extra="allow")


class FactIn(Asked):
    """A prompt and the answer that shall follow it."""

    prompt: Text = Field(examples=["Which instrument does Karel Corkstein play?"])
    answer: Text = Field(examples=["banjo"])

    def fact(self) -> Fact:
        """As the editor takes it."""
        return Fact(self.prompt, self.answer)


class EditsIn(Asked):
    """Facts that shall hold, and corrections to be taken back: all of it or nothing."""

    facts: list[FactIn] = Field(default=[], description="one change of weights makes all of them hold")
    remove: list[EditId] = Field(default=[], description="ids of corrections to take back in the same version")
    dry_run: bool = Field(default=False, description="compute and measure, publish nothing")
    base_version: Name | None = Field(default=None, description="only if this version is live; else 409")

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [{"facts": [{"prompt": "Which instrument does Karel Corkstein play?", "answer": "banjo"}]}]
        },
    )


class EditResult(Told):
    """What became of one fact."""

    index: int
    id: str | None
    status: Literal["added", "unchanged"]
    supersedes: str | None
    holds: bool = Field(description="whether the whole answer is the most probable one, token by token")
    tokens_right: int
    tokens: int


class Guard(Told):
    """What was measured before publishing."""

    max_shift_ratio: float | None = None
    perplexity_ratio: float | None = None


class EditsOut(Told):
    """A published version, or what it would be."""

    version: str | None
    number: int | None
    parent: str | None
    dry_run: bool
    edits: list[EditResult]
    removed: list[str]
    num_facts: int
    guard: Guard


class JobOut(Told):
    """A large request that is worked on."""

    id: str
    state: Literal["queued", "running", "done", "failed"]
    done: int
    total: int
    result: EditsOut | None = None
    problem: dict[str, Any] | None = None


class EditOut(Told):
    """A correction, and whether it holds in what is live now."""

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


class EditList(Told):
    """A page of corrections, the newest first."""

    edits: list[EditOut]
    next: int | None = Field(description="give it as `before` for the next page")


class VersionOut(Told):
    """An immutable state of the model."""

    id: str
    number: int
    parent: str | None
    num_facts: int
    actor: str
    at: str
    aliases: list[str]
    guard: Guard


class EndedEdit(EditOut):
    """A correction that a version took back."""

    how: Literal["removed", "superseded"]


class VersionDetail(VersionOut):
    """With what it changed."""

    added: list[EditOut]
    ended: list[EndedEdit]


class VersionList(Told):
    """A page of versions, the newest first."""

    versions: list[VersionOut]
    next: int | None


class AliasIn(Asked):
    """Where an alias shall point."""

    version: Name


class AliasOut(Told):
    """A name that moves from version to version."""

    name: str
    version: str
    revision: int


class AliasList(Told):
    """All aliases."""

    aliases: list[AliasOut]


class RecordIn(Asked):
    """An edit with what must follow from it and what must not."""

    prompt: Text
    answer: Text
    rephrasings: list[Text] = []
    unrelated: list[FactIn] = []

    def texts(self) -> list[str]:
        """Everything that a model would read of it."""
        others = (text for fact in self.unrelated for text in (fact.prompt, fact.answer))
        return [self.prompt, self.answer, *self.rephrasings, *others]

    def num_facts(self) -> int:
        """How many prompts are asked for it."""
        return 1 + len(self.rephrasings) + len(self.unrelated)

    def record(self) -> EditRecord:
        """As the evaluation takes it."""
        return EditRecord(
            Fact(self.prompt, self.answer),
            tuple(Fact(prompt, self.answer) for prompt in self.rephrasings),
            tuple(fact.fact() for fact in self.unrelated),
        )


class EvaluateIn(Asked):
    """Records to measure a version on."""

    records: list[RecordIn] = Field(min_length=1)
    version: Name = "live"
    generate: bool = Field(default=True, description="also compare freely generated answers")


class EvaluateOut(Told):
    """ES, GS, LS and what goes with them, and every fact before and after."""

    version: str
    scores: dict[str, float | int | None]
    facts: list[dict[str, Any]]


class ExportIn(Asked):
    """How a version leaves the endpoint."""

    kind: Literal["delta", "lora", "merged"] = "delta"
    max_rank: int = Field(default=512, ge=1, le=4096, description="of a LoRA; above it truncated, the error stated")


class ExportOut(Told):
    """What was written, and where it can be fetched."""

    version: str
    kind: str
    files: dict[str, str] = Field(description="address by file name")
    manifest: dict[str, Any]


class AuditOut(Told):
    """Entries of the ledger, the oldest first."""

    entries: list[dict[str, Any]]
    next: int | None
    intact: bool | None = Field(description="whether the whole chain is what was written; null unless asked for")


class ProblemOut(Told):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str

"""Every setting of the endpoint, once. Unknown keys are errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from malmen.config import Section, describe_settings, explain, read_override, read_yaml, set_key
from malmen.errors import UsageError


class GuardConfig(Section):
    """What a new version must satisfy before anybody is served it."""

    min_success: float = Field(default=0.9, ge=0, le=1, description="share of a request's facts that must hold")
    max_shift_ratio: float = Field(default=2.0, gt=0, description="‖S‖/‖W‖ of any layer, at most")
    max_perplexity_ratio: float = Field(
        default=1.5, gt=0, description="perplexity on the probes, edited : unedited, at most"
    )
    probes: str | None = Field(
        default=None, description="facts that no edit should touch; default: unrelated ones of the editor's own data"
    )
    num_probes: int = Field(default=64, gt=0, description="how many of them are asked")


class LimitConfig(Section):
    """What a caller may ask for."""

    body_bytes: int = Field(default=8_000_000, gt=0, description="of a request, at most")
    facts_per_call: int = Field(default=10_000, gt=0, description="in one request, at most")
    job_facts: int = Field(default=256, gt=0, description="a request with more facts than this runs as a job")
    text_chars: int = Field(default=8_000, gt=0, description="of a prompt or answer, at most")
    max_tokens: int = Field(default=256, gt=0, description="new tokens of a completion, at most")
    requests_per_minute: int = Field(default=1200, gt=0, description="of one token, at most; then 429")
    evaluate_records: int = Field(default=256, gt=0, description="in one evaluation, at most")
    evaluate_facts: int = Field(
        default=2048, gt=0, description="edits, rephrasings and unrelated facts of one evaluation together, at most"
    )
    waiting_jobs: int = Field(default=32, gt=0, description="large batches that may wait; then 429")
    waiting_edits: int = Field(default=256, gt=0, description="requests that may wait for the writer; then 429")


class WriterConfig(Section):
    """The one process that computes versions."""

    batch: int = Field(default=64, gt=0, description="requests merged into one solve, at most")
    wait_seconds: float = Field(default=0.02, ge=0, description="how long the first of them waits for others")
    cpus: float = Field(default=0.5, ge=0, description="of Ray, for it")
    gpus: float | None = Field(default=None, ge=0, description="of Ray, for it; default: half of one where there are")
    device: str | None = Field(default=None, description="of its model, as model.device; default: the editor's")


class ReaderConfig(Section):
    """The processes that answer prompts."""

    min_replicas: int = Field(default=1, gt=0, description="that are always there")
    max_replicas: int = Field(default=1, gt=0, description="under load")
    target_requests: float = Field(default=8, gt=0, description="ongoing requests of one, above which another comes")
    versions: int = Field(default=8, gt=0, description="whose shifts are kept in memory")
    batch: int = Field(default=16, gt=0, description="prompts decoded together, at most")
    wait_seconds: float = Field(default=0.005, ge=0, description="how long the first of them waits for others")
    cpus: float = Field(default=0.5, ge=0, description="of Ray, for each")
    gpus: float | None = Field(default=None, ge=0, description="of Ray, for each; default: half of one, if any")
    device: str | None = Field(
        default=None, description="of its model, as model.device; `split`: over its GPUs; default: the editor's"
    )


class ServeConfig(Section):
    """A whole endpoint."""

    editor: str = Field(description="a run or checkpoint folder, or models:/NAME/VERSION, models:/NAME@ALIAS")
    model: str | None = Field(default=None, description="the base model, if not where the editor's config says")
    store: str = Field(default="runs/serve", description="the folder of ledger, versions, tokens; shared on a cluster")
    database: str | None = Field(default=None, description="of the ledger; default: sqlite in the store")
    tokens: str | None = Field(default=None, description="the file of tokens; default: tokens.yaml in the store")
    ingress_replicas: int = Field(default=1, gt=0, description="processes that take HTTP requests")
    guard: GuardConfig = GuardConfig()
    limits: LimitConfig = LimitConfig()
    writer: WriterConfig = WriterConfig()
    reader: ReaderConfig = ReaderConfig()

    @property
    def database_url(self) -> str:
        """Where the ledger is."""
        return self.database or f"sqlite:///{Path(self.store).absolute() / 'ledger.db'}"


def load_settings(path: Path | None, overrides: Sequence[str] = (), **given: Any) -> ServeConfig:
    """A YAML file, what was given as options on top of it, and `key=value` overrides on top of both."""
    raw = {} if path is None else read_yaml(path, "settings file")
    raw.update({name: value for name, value in given.items() if value is not None})
    for key, value in map(read_override, overrides):
        set_key(raw, key, value)
    return parse_settings(raw, str(path) if path else "the settings")


def parse_settings(raw: dict[str, Any], source: str) -> ServeConfig:
    """Settings from plain values; UsageError names every wrong key and the nearest right one."""
    try:
        return ServeConfig.model_validate(raw)
    except ValidationError as error:
        known = [row["key"] for row in describe_settings(ServeConfig)]
        raise UsageError(f"{source}: " + "; ".join(explain(one, known) for one in error.errors())) from error

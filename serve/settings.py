"""The endpoint's settings. Unknown keys are errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from malmen.config import Section, describe_settings, read_override, read_yaml, set_key, usage_error


class GuardConfig(Section):
    """What a new version must satisfy before it is served."""

    min_success: float = Field(default=0.9, ge=0, le=1, description="share of a request's facts that must hold")
    max_shift_ratio: float = Field(default=2.0, gt=0, description="‖S‖/‖W‖ of any layer, at most")
    max_perplexity_ratio: float = Field(
        default=1.5, gt=0, description="perplexity on the probes, edited : unedited, at most"
    )
    probes: str | None = Field(
        default=None,
        description="file of facts that no edit should change; default: unrelated facts of the editor's data",
    )
    num_probes: int = Field(default=64, gt=0, description="number of probes, at most")


class LimitConfig(Section):
    """How much a caller may ask for."""

    body_bytes: int = Field(default=8_000_000, gt=0, description="size of a request, at most")
    facts_per_call: int = Field(default=10_000, gt=0, description="facts in one request, at most")
    job_facts: int = Field(default=256, gt=0, description="a request with more facts than this runs as a job")
    text_chars: int = Field(default=8_000, gt=0, description="characters of a prompt or answer, at most")
    max_tokens: int = Field(default=256, gt=0, description="new tokens of a completion, at most")
    requests_per_minute: int = Field(default=1200, gt=0, description="requests with one token, at most; above it 429")
    evaluate_records: int = Field(default=256, gt=0, description="records in one evaluation, at most")
    evaluate_facts: int = Field(
        default=2048, gt=0, description="edits, rephrasings and unrelated facts of one evaluation together, at most"
    )
    waiting_jobs: int = Field(default=32, gt=0, description="jobs that may wait; above it 429")
    waiting_edits: int = Field(default=256, gt=0, description="requests that may wait for the writer; above it 429")


class WriterConfig(Section):
    """The one process that computes versions."""

    batch: int = Field(default=64, gt=0, description="requests merged into one solve, at most")
    wait_seconds: float = Field(default=0.02, ge=0, description="how long the first of them waits for others")
    cpus: float = Field(default=0.5, ge=0, description="Ray CPUs of the writer")
    gpus: float | None = Field(default=None, ge=0, description="Ray GPUs of the writer; default: 0.5 if there are any")
    device: str | None = Field(default=None, description="as model.device; default: the editor's")


class ReaderConfig(Section):
    """The processes that answer prompts."""

    min_replicas: int = Field(default=1, gt=0, description="readers that always run")
    max_replicas: int = Field(default=1, gt=0, description="readers under load, at most")
    target_requests: float = Field(default=8, gt=0, description="ongoing requests per reader before another starts")
    versions: int = Field(default=8, gt=0, description="versions whose shifts stay in memory")
    batch: int = Field(default=16, gt=0, description="prompts decoded together, at most")
    wait_seconds: float = Field(default=0.005, ge=0, description="how long the first of them waits for others")
    cpus: float = Field(default=0.5, ge=0, description="Ray CPUs of each reader")
    gpus: float | None = Field(default=None, ge=0, description="Ray GPUs of each reader; default: 0.5 if there are any")
    device: str | None = Field(
        default=None, description="as model.device; `split`: over the reader's GPUs; default: the editor's"
    )


class ServeConfig(Section):
    """An endpoint."""

    editor: str = Field(description="a run or checkpoint folder, RUN@best, models:/NAME/VERSION or models:/NAME@ALIAS")
    model: str | None = Field(default=None, description="the base model; default: the one in the editor's config")
    store: str = Field(default="runs/serve", description="folder of ledger, versions and tokens; shared on a cluster")
    database: str | None = Field(default=None, description="URL of the ledger's database; default: sqlite in the store")
    tokens: str | None = Field(default=None, description="file of tokens; default: tokens.yaml in the store")
    ingress_replicas: int = Field(default=1, gt=0, description="processes that answer HTTP requests")
    guard: GuardConfig = GuardConfig()
    limits: LimitConfig = LimitConfig()
    writer: WriterConfig = WriterConfig()
    reader: ReaderConfig = ReaderConfig()

    @property
    def database_url(self) -> str:
        """The ledger's database."""
        return self.database or f"sqlite:///{Path(self.store).absolute() / 'ledger.db'}"

    @property
    def tokens_file(self) -> Path:
        """The file of tokens."""
        return Path(self.tokens) if self.tokens else Path(self.store) / "tokens.yaml"

    @property
    def blob_folder(self) -> Path:
        """The folder of rows and shifts."""
        return Path(self.store) / "blobs"

    def export_folder(self, version: str, kind: str) -> Path:
        """The folder of an export."""
        return Path(self.store) / "exports" / f"{version}-{kind}"


def load_settings(path: Path | None, overrides: Sequence[str] = (), **given: Any) -> ServeConfig:
    """The settings of a YAML file, overridden by options, overridden by `key=value`."""
    raw = {} if path is None else read_yaml(path, "settings file")
    raw.update({name: value for name, value in given.items() if value is not None})
    for key, value in map(read_override, overrides):
        set_key(raw, key, value)
    return parse_settings(raw, str(path) if path else "the settings")


def parse_settings(raw: dict[str, Any], source: str) -> ServeConfig:
    """Settings from plain values; UsageError names each unknown key and the nearest known one."""
    try:
        return ServeConfig.model_validate(raw)
    except ValidationError as error:
        raise usage_error(source, error, [row["key"] for row in describe_settings(ServeConfig)]) from error

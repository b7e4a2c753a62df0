"""What the roles are made of: the editor, the frozen model, the ledger and the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from malmen.config import Config
from malmen.data.readers import read_records
from malmen.data.records import Fact, unrelated_to_all
from malmen.data.splits import validation_records
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, load_lm
from malmen.platform.cluster import on_own_device
from malmen.runs.checkpoint import load_editor
from malmen.runs.checkpoint_lookup import read_config, read_state
from malmen.serve.guards import Guards
from malmen.serve.ledger.blobs import BlobStore
from malmen.serve.ledger.opening import find_editor, open_ledger
from malmen.serve.reading.reader import Reader
from malmen.serve.service import EditService
from malmen.serve.settings import ServeConfig


def open_blobs(settings: ServeConfig) -> BlobStore:
    """The shifts and rows."""
    return BlobStore(Path(settings.store) / "blobs")


def make_service(settings: ServeConfig) -> EditService:
    """The writer's service, caught up with the ledger."""
    lm, editor, config = _load(settings)
    guards = Guards(lm, settings.guard, load_probes(settings, config), config.batch.token_budget, config.data)
    return EditService(lm, editor, open_ledger(settings), open_blobs(settings), guards)


def make_reader(settings: ServeConfig) -> Reader:
    """A reader."""
    folder = find_editor(settings.editor)
    config = read_config(folder)
    lm = _load_lm(settings, config, settings.reader.device)
    wanted = read_state(folder)["base_model"]
    if lm.fingerprint() != wanted:
        raise EditError(f"the editor in {folder} belongs to base model {wanted}; this one is {lm.fingerprint()}")
    return Reader(lm, config, open_blobs(settings), settings.reader.versions)


def load_probes(settings: ServeConfig, config: Config) -> Sequence[Fact]:
    """Facts that no edit should touch: the configured file's, else unrelated ones of the editor's validation data."""
    number = settings.guard.num_probes
    if settings.guard.probes is not None:
        return [record.edit for record in read_records(Path(settings.guard.probes), "auto")][:number]
    try:
        records = validation_records(config)[: 2 * number]
    except EditError as error:
        raise EditError(
            f"the guard has no probes, because the editor's validation data cannot be read ({error}); "
            "name a file of facts that no edit should touch: guard.probes=probes.jsonl"
        ) from error
    found = dict.fromkeys(fact for some in unrelated_to_all(records) for fact in some)
    return list(found)[:number]


def _load(settings: ServeConfig) -> tuple[LanguageModel, Editor, Config]:
    folder = find_editor(settings.editor)
    config = read_config(folder)
    lm = _load_lm(settings, config, settings.writer.device)
    return lm, load_editor(folder, lm), config


def _load_lm(settings: ServeConfig, config: Config, device: str | None) -> LanguageModel:
    """The base model, where the endpoint's settings want it."""
    wanted = {"name": settings.model, "device": device}
    model = config.model.model_copy(update={key: value for key, value in wanted.items() if value is not None})
    return load_lm(on_own_device(model))

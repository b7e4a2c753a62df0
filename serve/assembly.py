"""Build the writer's service and the readers from the settings: editor, frozen model, ledger, store and probes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from malmen.config import Config
from malmen.data.readers import read_records
from malmen.data.records import Fact, unrelated_to_all
from malmen.data.splits import validation_records
from malmen.errors import EditError, check_base_model
from malmen.lm.model import LanguageModel, load_lm
from malmen.platform.cluster import on_own_device
from malmen.runs.checkpoint import load_editor
from malmen.runs.checkpoint_lookup import read_config, read_state
from malmen.serve.ledger.blobs import BlobStore
from malmen.serve.ledger.opening import find_editor, open_ledger
from malmen.serve.reading.reader import Reader
from malmen.serve.settings import ServeConfig
from malmen.serve.writing.guards import Guards
from malmen.serve.writing.service import EditService


def build_service(settings: ServeConfig) -> EditService:
    """The writer's service, in the state of the ledger."""
    folder, config, lm = _load(settings, settings.writer.device)
    guards = Guards(lm, settings.guard, load_probes(settings, config), config.batch.token_budget, config.data)
    return EditService(lm, load_editor(folder, lm), open_ledger(settings), BlobStore(settings.blob_folder), guards)


def build_reader(settings: ServeConfig) -> Reader:
    """A reader of the store's versions."""
    folder, config, lm = _load(settings, settings.reader.device)
    check_base_model(f"the editor in {folder}", read_state(folder)["base_model"], lm.fingerprint())
    return Reader(lm, config, BlobStore(settings.blob_folder), settings.reader.versions)


def load_probes(settings: ServeConfig, config: Config) -> Sequence[Fact]:
    """Facts that no edit should change: the configured file's, else unrelated ones of the editor's validation data."""
    number = settings.guard.num_probes
    if settings.guard.probes is not None:
        return [record.edit for record in read_records(Path(settings.guard.probes), "auto")][:number]
    try:
        records = validation_records(config)[: 2 * number]
    except EditError as error:
        raise EditError(
            f"the guard has no probes, because the editor's validation data cannot be read ({error}); "
            "name a file of facts that no edit should change: guard.probes=probes.jsonl"
        ) from error
    return list(dict.fromkeys(fact for unrelated in unrelated_to_all(records) for fact in unrelated))[:number]


def _load(settings: ServeConfig, device: str | None) -> tuple[str | Path, Config, LanguageModel]:
    """The editor's folder and config, and the base model from the place and on the device that the settings name."""
    folder = find_editor(settings.editor)
    config = read_config(folder)
    given = {"name": settings.model, "device": device}
    model = config.model.model_copy(update={key: value for key, value in given.items() if value is not None})
    return folder, config, load_lm(on_own_device(model))

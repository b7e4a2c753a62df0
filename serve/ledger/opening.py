"""The ledger that belongs to the configured editor; needs no torch, so that an ingress starts quickly."""

from __future__ import annotations

import hashlib
from pathlib import Path

from malmen.errors import EditError
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_state
from malmen.runs.storage import RunStore
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.settings import ServeConfig


def find_editor(name: str) -> str | Path:
    """The checkpoint folder (or URL) of a run, a checkpoint, or an editor in the model registry."""
    if name.startswith("models:/"):
        from malmen.platform.tracking.registry import download_editor

        return download_editor(name)
    return latest_checkpoint(name)


def weights_hash(folder: str | Path) -> str:
    """What a ledger knows the editor of a checkpoint by."""
    try:
        with (
            RunStore(folder).fetch(without=["optimizer.safetensors"]) as local,
            (local / "editor.safetensors").open("rb") as file,
        ):
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise EditError(f"cannot read the editor in {folder}: {error.strerror or error}") from error


def open_ledger(settings: ServeConfig) -> Ledger:
    """The ledger of the configured editor; needs no model in memory."""
    folder = find_editor(settings.editor)
    Path(settings.store).mkdir(parents=True, exist_ok=True)
    return Ledger(settings.database_url, read_state(folder)["base_model"], weights_hash(folder))

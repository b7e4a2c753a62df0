"""The ledger that belongs to the configured editor; needs no torch, so that an ingress starts quickly."""

from __future__ import annotations

import hashlib
from pathlib import Path

from malmen.checkpoint_files import latest_checkpoint, read_state
from malmen.serve.ledger import Ledger
from malmen.serve.settings import ServeConfig


def find_editor(name: str) -> Path:
    """The checkpoint folder of a run, a checkpoint, or an editor in the model registry."""
    if name.startswith("models:/"):
        from malmen.platform.registry import download_editor

        return download_editor(name)
    return latest_checkpoint(Path(name))


def open_ledger(settings: ServeConfig) -> Ledger:
    """The ledger of the configured editor; needs no model in memory."""
    folder = find_editor(settings.editor)
    Path(settings.store).mkdir(parents=True, exist_ok=True)
    weights = hashlib.sha256((folder / "editor.safetensors").read_bytes()).hexdigest()
    return Ledger(settings.database_url, read_state(folder)["base_model"], weights[:16])

"""Open the ledger of a store, with the store's own copy of the editor that the ledger began with.

The rows of two editors cannot be added, so a ledger stays with one editor, while training may continue in the run that
it came from and prune its checkpoints. A command that names the run therefore gets the copy; a new store gets the
newest checkpoint. Needs no torch, so that an ingress starts quickly.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from contextlib import closing, suppress
from pathlib import Path

from malmen.errors import EditError
from malmen.platform.tracking.registry import FILES, download_editor
from malmen.runs.checkpoint_lookup import BEST, latest_checkpoint, read_json, read_state
from malmen.runs.files import atomic_file, atomic_folder
from malmen.runs.storage import STATE_FILE, RunStore
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.ledger.view import LedgerView
from malmen.serve.settings import ServeConfig

log = logging.getLogger(__name__)
SOURCE = "source.json"
_REGISTRY = "models:/"


def open_ledger(settings: ServeConfig) -> Ledger:
    """The ledger of the configured editor; creates it if it does not exist."""
    folder = find_editor(settings.editor)
    Path(settings.store).mkdir(parents=True, exist_ok=True)
    return Ledger(settings.database_url, read_state(folder)["base_model"], weights_hash(folder))


def find_editor(name: str) -> str | Path:
    """The checkpoint folder (or URL) of a run, a checkpoint, or an editor in the model registry."""
    return download_editor(name) if name.startswith(_REGISTRY) else latest_checkpoint(name)


def weights_hash(folder: str | Path) -> str:
    """The hash by which a ledger knows its editor."""
    try:
        with (
            RunStore(folder).fetch(without=["optimizer.safetensors"]) as local,
            (local / "editor.safetensors").open("rb") as file,
        ):
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise EditError(f"cannot read the editor in {folder}: {error.strerror or error}") from error


def pin_editor(settings: ServeConfig) -> ServeConfig:
    """These settings with the store's copy as the editor; creates the copy if the store has none.

    An editor that is not the ledger's is left as it is: `open_ledger` refuses it.
    """
    run, began_with = settings.editor.removesuffix(BEST), _ledgers_editor(settings)
    homes = Path(settings.store) / "editors"  # named by content, as blobs are: two ledgers in one store share nothing
    home = homes / began_with if began_with else None
    if home is None or not (home / SOURCE).exists() or read_json(home, SOURCE).get("editor") != run:
        folder = _checkpoint(settings.editor, began_with)
        weights = weights_hash(folder)
        if began_with not in (None, weights):
            return settings.model_copy(update={"editor": str(folder)})
        home = homes / weights
        if not (home / STATE_FILE).exists():
            fetched = RunStore(folder).fetch(without=["optimizer.safetensors"])
            with atomic_folder(home, replaces=STATE_FILE) as fresh, fetched as local:
                for file in FILES:
                    shutil.copyfile(local / file, fresh / file)
        atomic_file(home / SOURCE, json.dumps({"editor": run}) + "\n")
    _warn_if_newer(settings.editor, home)
    return settings.model_copy(update={"editor": str(home)})


def _ledgers_editor(settings: ServeConfig) -> str | None:
    """The hash of the ledger's editor, if there is a ledger; creates nothing."""
    if settings.database is None and not (Path(settings.store) / "ledger.db").exists():
        return None
    with closing(LedgerView(settings.database_url)) as ledger:
        return ledger.about().get("editor")


def _checkpoint(name: str, began_with: str | None) -> str | Path:
    """The run's checkpoint that the ledger began with, if it still exists; else what the name stands for."""
    newest = find_editor(name)
    if began_with is None or name.startswith(_REGISTRY):
        return newest
    run = RunStore(name.removesuffix(BEST))
    older = (run.join(checkpoint) for checkpoint in reversed(run.checkpoints()))
    return next((folder for folder in (newest, *older) if weights_hash(folder) == began_with), newest)


def _warn_if_newer(name: str, home: Path) -> None:
    if name.startswith(_REGISTRY):
        return
    with suppress(EditError, OSError):  # the run may be gone
        served, newest = read_state(home)["step"], read_state(find_editor(name))["step"]
        if served != newest:
            serves = f"this store serves the editor of step {served}, which its ledger began with"
            log.warning("%s; %s is at step %d now: choose another store to serve that", serves, name, newest)

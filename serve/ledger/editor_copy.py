"""The store's own copy of the editor that it was begun with: training may go on in the run, and prune it there.

A ledger adds up with one editor only. So a command that names a run goes on with the checkpoint that its ledger was
begun with, and with another store takes the newest. Needs no torch.
"""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import suppress
from pathlib import Path

from malmen.errors import EditError
from malmen.runs.checkpoint_lookup import BEST, read_json, read_state
from malmen.runs.files import atomic_file, atomic_folder
from malmen.runs.storage import STATE_FILE, RunStore
from malmen.serve.ledger.opening import find_editor, weights_hash
from malmen.serve.ledger.view import LedgerView
from malmen.serve.settings import ServeConfig

log = logging.getLogger(__name__)
SOURCE = "source.json"


def keep_editor(settings: ServeConfig) -> ServeConfig:
    """These settings with the copy as the editor; one that is not the ledger's is left for the ledger to refuse."""
    run, begun = settings.editor.removesuffix(BEST), _begun_with(settings)
    home = _home(settings, begun) if begun else None
    if home is None or _source(home) != run:
        folder = _checkpoint(settings.editor, begun)
        found = weights_hash(folder)
        home = _home(settings, found)
        if begun not in (None, found):
            return settings.model_copy(update={"editor": str(folder)})
        _copy(folder, home)
        atomic_file(home / SOURCE, json.dumps({"editor": run}) + "\n")
    _tell_if_newer(settings.editor, home)
    return settings.model_copy(update={"editor": str(home)})


def _begun_with(settings: ServeConfig) -> str | None:
    """The hash of the ledger's editor; nothing is made where there is none."""
    if settings.database is None and not (Path(settings.store) / "ledger.db").exists():
        return None
    ledger = LedgerView(settings.database_url)
    try:
        return ledger.about().get("editor")
    finally:
        ledger.close()


def _checkpoint(name: str, begun: str | None) -> str | Path:
    """Of a run, the checkpoint that the ledger was begun with, if it is still there; else what the name stands for."""
    newest = find_editor(name)
    if begun is None or name.startswith("models:/"):
        return newest
    run = RunStore(name.removesuffix(BEST))
    others = (run.join(one) for one in reversed(run.checkpoints()))
    return next((one for one in (newest, *others) if weights_hash(one) == begun), newest)


def _copy(folder: str | Path, home: Path) -> None:
    from malmen.platform.tracking.registry import FILES

    if (home / STATE_FILE).exists():
        return
    with (
        atomic_folder(home, replaces=STATE_FILE) as fresh,
        RunStore(folder).fetch(without=["optimizer.safetensors"]) as local,
    ):
        for file in FILES:
            shutil.copyfile(local / file, fresh / file)


def _tell_if_newer(name: str, home: Path) -> None:
    if name.startswith("models:/"):
        return
    with suppress(EditError, OSError):  # the run need not be there any more
        served, newest = read_state(home)["step"], read_state(find_editor(name))["step"]
        if served != newest:
            log.warning(
                "the store was begun with the editor of step %d, which is served; %s is at step %d now: "
                "choose another store to serve that", served, name, newest,
            )  # fmt: skip


def _home(settings: ServeConfig, weights: str) -> Path:
    """Named by content, as blobs are: a second ledger in the same store takes nothing from the first."""
    return Path(settings.store) / "editors" / weights


def _source(home: Path) -> str | None:
    """What was asked for when the copy was made."""
    return read_json(home, SOURCE).get("editor") if (home / SOURCE).exists() else None

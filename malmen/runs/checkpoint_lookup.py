"""Finding the checkpoints of a run and reading their state and config; needs no torch."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from malmen.config import Config, stored_config
from malmen.errors import EditError
from malmen.runs.storage import CHECKPOINT_PREFIX, STATE_FILE, RunStore

FORMAT = 1
BEST = "@best"  # after a run's name: its checkpoint with the highest score instead of the newest


def latest_checkpoint(folder: str | Path) -> str | Path:
    """The folder itself if it is a checkpoint, else the newest one in it; of `RUN@best`, the best one."""
    if str(folder).endswith(BEST):
        return best_checkpoint(str(folder).removesuffix(BEST))
    store = RunStore(folder)
    if store.exists(STATE_FILE):
        return store.location
    checkpoints = store.checkpoints()
    if not checkpoints:
        raise EditError(
            f"{folder} holds no trained editor: expected {STATE_FILE}, or {CHECKPOINT_PREFIX}* folders "
            "as `malmen train` writes"
        )
    return store.join(checkpoints[-1])


def best_checkpoint(run: str | Path) -> str | Path:
    """The checkpoint with the highest score; the newest if none was evaluated."""
    store = RunStore(run)
    best = best_of(scores_by_checkpoint(store))
    return store.join(best) if best else latest_checkpoint(run)


def read_state(folder: str | Path) -> dict[str, Any]:
    """state.json of a checkpoint, or of a run's newest."""
    state = read_json(latest_checkpoint(folder), STATE_FILE)
    if state.get("format") != FORMAT:
        raise EditError(f"{folder} has checkpoint format {state.get('format')!r}; this version reads format {FORMAT}")
    return state


def read_config(folder: str | Path) -> Config:
    """The resolved config of the run that wrote a checkpoint."""
    folder = latest_checkpoint(folder)
    return stored_config(read_json(folder, "config.json"), str(RunStore(folder).join("config.json")))


def scores_by_checkpoint(store: RunStore) -> dict[str, float | None]:
    """Scores by name of checkpoint, the newest last. One that cannot be read is left out: neither best nor removed."""
    scores: dict[str, float | None] = {}
    for name in store.checkpoints():
        with suppress(EditError):
            scores[name] = read_state(store.join(name)).get("score")
    return scores


def best_of(scores: dict[str, float | None]) -> str | None:
    """The name with the highest score, the newest of equals; None if none was evaluated."""
    scored = {name: value for name, value in reversed(scores.items()) if value is not None}
    return max(scored, key=lambda name: scored[name], default=None)


def read_json(folder: str | Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a folder or URL; EditError if it is not one."""
    store = RunStore(folder)
    path = store.join(name)
    try:
        content = json.loads(store.read_text(name))
    except OSError as error:
        raise EditError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise EditError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise EditError(f"{path} holds a {type(content).__name__}; expected an object")
    return content

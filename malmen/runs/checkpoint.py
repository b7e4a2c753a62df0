"""Saving and loading trained editors and edits: folders of safetensors and JSON.

A folder appears complete or not at all, so a killed process leaves the earlier one. A run and its checkpoints may be on
a disk or at any URL that fsspec knows (storage.py). Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import malmen
from malmen.editor import Editor
from malmen.errors import EditError, wrong_base_model
from malmen.lm.layers import LayerSpec
from malmen.metrics import score
from malmen.runs.checkpoint_lookup import (
    FORMAT,
    best_of,
    latest_checkpoint,
    read_config,
    read_json,
    read_state,
    scores_by_checkpoint,
)
from malmen.runs.files import atomic_file, atomic_folder
from malmen.runs.storage import CHECKPOINT_PREFIX, STATE_FILE, RunStore

if TYPE_CHECKING:
    from malmen.lm.model import LanguageModel


def save_checkpoint(
    run: str | Path, editor: Editor, fingerprint: str, *, keep: int = 2, extra: Mapping[str, Any] | None = None
) -> str | Path:
    """Write `run/checkpoint-STEP` with all that a resumed run needs: θ, normalisers, Adam, state of the generator.

    The `keep` newest checkpoints and the best one stay. `extra` is added to state.json.
    """
    store = RunStore(run)
    name = f"{CHECKPOINT_PREFIX}{editor.steps_done:07d}"
    state = _state(editor, fingerprint)
    assert keep > 0 and not state.keys() & (extra or {}).keys(), (keep, extra)
    with store.publish(name) as folder:
        save_file(_contiguous(editor.state_dict()), folder / "editor.safetensors")
        save_file(_contiguous(editor.optimizer_state()), folder / "optimizer.safetensors")
        atomic_file(folder / "config.json", _json(editor.config.model_dump(mode="json")))
        atomic_file(folder / STATE_FILE, _json({**state, **(extra or {})}))
    _keep_few(store, keep)
    return store.join(name)


def add_scores(run: str | Path, step: int, scores: Mapping[str, Any], *, keep: int = 2) -> None:
    """Add an evaluation to the newest checkpoint, which is saved before it: a failed evaluation costs no steps."""
    store = RunStore(run)
    newest = store.checkpoints()[-1]
    state = read_state(store.join(newest))
    assert state["step"] == step, (state["step"], step)
    state |= {"scores": dict(scores), "score": score(scores)}
    store.write_text(f"{newest}/{STATE_FILE}", _json(state))
    _keep_few(store, keep)


def load_editor(folder: str | Path, lm: LanguageModel | None = None, *, optimizer: bool = False) -> Editor:
    """The editor of a checkpoint or run folder; EditError for another base model than it was trained for."""
    folder = latest_checkpoint(folder)
    state = read_state(folder)
    config = read_config(folder)
    if lm is not None and lm.fingerprint() != state["base_model"]:
        raise wrong_base_model(f"the editor in {folder} ({config.model.name})", state["base_model"], lm.fingerprint())
    editor = Editor([LayerSpec(**layer) for layer in state["layers"]], config)
    with RunStore(folder).fetch(without=() if optimizer else ["optimizer.safetensors"]) as local:
        try:
            editor.load_state_dict(_load_tensors(local, "editor.safetensors", folder))
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise EditError(f"the tensors in {folder} do not fit its config: {reason}") from error
        editor.steps_done, editor.base_model = state["step"], state["base_model"]
        editor.locality_coef = state.get("locality_coef", editor.locality_coef)
        if lm is not None:
            editor.to(lm.device)
        if optimizer:
            editor.load_optimizer_state(_load_tensors(local, "optimizer.safetensors", folder))
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))
    return editor


def save_edit(folder: Path, shifts: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """Write an edit: its shifts as float32, and `manifest`, which names its base model."""
    with atomic_folder(folder, replaces="edit.json") as fresh:
        save_file(_contiguous({name: shift.float() for name, shift in shifts.items()}), fresh / "shifts.safetensors")
        atomic_file(fresh / "edit.json", _json({"format": FORMAT, **manifest}))


def load_edit(folder: Path, lm: LanguageModel | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Shifts and manifest of an edit; EditError for another base model."""
    if not (folder / "edit.json").exists():
        raise EditError(f"{folder} holds no edit: expected edit.json and shifts.safetensors as `malmen edit` writes")
    manifest = read_json(folder, "edit.json")
    if manifest.get("format") != FORMAT or "base_model" not in manifest:
        raise EditError(f"{folder}/edit.json has format {manifest.get('format')!r}; this version reads format {FORMAT}")
    if lm is not None and lm.fingerprint() != manifest["base_model"]:
        raise wrong_base_model(f"the edit in {folder}", manifest["base_model"], lm.fingerprint())
    return _load_tensors(folder, "shifts.safetensors", folder), manifest


def _state(editor: Editor, fingerprint: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": editor.steps_done,  # with the seed it fixes the data position: sampling draws by step number
        "seed": editor.config.seed,
        "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
        "base_model": fingerprint,
        "layers": [vars(layer) for layer in editor.layers],
        "scores": {},  # `add_scores` fills in both
        "score": None,
        "versions": {
            "malmen": malmen.__version__,
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
        },
    }


def _keep_few(store: RunStore, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints and the best one."""
    scores = scores_by_checkpoint(store)
    for name in list(scores)[:-keep]:
        if name != best_of(scores):
            store.remove(name)


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _load_tensors(local: Path, name: str, folder: str | Path) -> dict[str, Tensor]:
    """A file of tensors in `local`, which is `folder` or a copy of it."""
    try:
        return load_file(local / name)
    except (SafetensorError, OSError) as error:
        raise EditError(
            f"cannot read {folder}/{name}: {error}; the file is damaged or incomplete, use an earlier checkpoint"
        ) from error


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"

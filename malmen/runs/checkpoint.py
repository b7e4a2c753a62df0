"""Folders of safetensors and JSON that hold a trained editor, or an edit.

A folder is there whole or not at all, so a killed process leaves the earlier one. A run and its checkpoints may be on a
disk or at any URL that fsspec knows (storage.py). Nothing is ever unpickled.
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
from malmen.errors import EditError
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
    run: str | Path,
    editor: Editor,
    fingerprint: str,
    scores: Mapping[str, Any] | None = None,
    *,
    keep: int = 2,
    extra: Mapping[str, Any] | None = None,
) -> str | Path:
    """`run/checkpoint-STEP` with θ, normalisers, Adam and all that is needed to go on; keeps the newest and the best.

    `extra` goes into state.json beside what is always there.
    """
    store = RunStore(run)
    name = f"{CHECKPOINT_PREFIX}{editor.steps_done:07d}"
    state = _state(editor, fingerprint, scores)
    assert keep > 0 and not state.keys() & (extra or {}).keys(), (keep, extra)
    with store.publish(name) as folder:
        save_file(_contiguous(editor.state_dict()), folder / "editor.safetensors")
        save_file(_contiguous(editor.optimizer_state()), folder / "optimizer.safetensors")
        _write_json(folder / "config.json", editor.config.model_dump(mode="json"))
        _write_json(folder / STATE_FILE, {**state, **(extra or {})})
    _keep_few(store, keep)
    return store.join(name)


def add_scores(run: str | Path, step: int, scores: Mapping[str, Any], *, keep: int = 2) -> None:
    """What was measured of the newest checkpoint. It is saved before: an evaluation that fails costs no steps."""
    store = RunStore(run)
    newest = store.checkpoints()[-1]
    state = read_state(store.join(newest))
    assert state["step"] == step, (state["step"], step)
    state |= {"scores": dict(scores), "score": score(scores)}
    store.write_text(f"{newest}/{STATE_FILE}", _json(state))
    _keep_few(store, keep)


def load_editor(folder: str | Path, lm: LanguageModel | None = None, *, optimizer: bool = False) -> Editor:
    """The editor of a checkpoint or run folder; refused for another base model than it was trained for."""
    folder = latest_checkpoint(folder)
    state = read_state(folder)
    config = read_config(folder)
    if lm is not None and lm.fingerprint() != state["base_model"]:
        raise EditError(
            f"the editor in {folder} was trained for base model {state['base_model']} ({config.model.name}); "
            f"this one is {lm.fingerprint()}: an editor works only on the weights it was trained for"
        )
    editor = Editor([LayerSpec(**layer) for layer in state["layers"]], config)
    with RunStore(folder).fetch(without=() if optimizer else ["optimizer.safetensors"]) as local:
        _load_into(editor, _load_tensors(local, "editor.safetensors", folder), folder)
        editor.steps_done = state["step"]
        editor.base_model = state["base_model"]
        if lm is not None:
            editor.to(lm.device)
        if optimizer:
            editor.load_optimizer_state(_load_tensors(local, "optimizer.safetensors", folder))
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))
    return editor


def save_edit(folder: Path, shifts: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """The shifts of an edit with what they belong to."""
    with atomic_folder(folder, replaces="edit.json") as fresh:
        save_file(_contiguous({name: shift.float() for name, shift in shifts.items()}), fresh / "shifts.safetensors")
        _write_json(fresh / "edit.json", {"format": FORMAT, **manifest})


def load_edit(folder: Path, lm: LanguageModel | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Shifts and manifest; refused for another base model."""
    if not (folder / "edit.json").exists():
        raise EditError(f"{folder} holds no edit: expected edit.json and shifts.safetensors as `malmen edit` writes")
    manifest = read_json(folder, "edit.json")
    if manifest.get("format") != FORMAT or "base_model" not in manifest:
        raise EditError(f"{folder}/edit.json has format {manifest.get('format')!r}; this version reads format {FORMAT}")
    if lm is not None and lm.fingerprint() != manifest["base_model"]:
        raise EditError(
            f"the edit in {folder} belongs to base model {manifest['base_model']}; this one is {lm.fingerprint()}"
        )
    return _load_tensors(folder, "shifts.safetensors", folder), manifest


# --- pieces ------------------------------------------------------------------------------------------


def _state(editor: Editor, fingerprint: str, scores: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": editor.steps_done,  # with the seed it fixes the data position: sampling draws by step number
        "seed": editor.config.seed,
        "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
        "base_model": fingerprint,
        "layers": [vars(layer) for layer in editor.layers],
        "scores": dict(scores or {}),
        "score": score(scores),
        "versions": {
            "malmen": malmen.__version__,
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
        },
    }


def _keep_few(store: RunStore, keep: int) -> None:
    """The newest ones, and the best."""
    found = scores_by_checkpoint(store)
    for old in list(found)[:-keep]:
        if old != best_of(found):
            store.remove(old)


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _load_tensors(local: Path, name: str, folder: str | Path) -> dict[str, Tensor]:
    """A file of `folder`, which `local` is or is a copy of."""
    try:
        return load_file(local / name)
    except (SafetensorError, OSError) as error:
        raise EditError(
            f"cannot read {folder}/{name}: {error}; the file is damaged or incomplete, use an earlier checkpoint"
        ) from error


def _load_into(editor: Editor, tensors: dict[str, Tensor], folder: str | Path) -> None:
    try:
        editor.load_state_dict(tensors)
    except RuntimeError as error:
        raise EditError(
            f"the tensors in {folder} do not fit its config: {' '.join(str(error).split())[:300]}"
        ) from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    atomic_file(path, _json(value))


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"

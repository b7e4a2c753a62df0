"""Folders of safetensors and JSON that hold a trained editor, or an edit.

A folder is there whole or not at all, so a killed process leaves the earlier one. A run and its checkpoints may be on a
disk or at any URL that fsspec knows (storage.py). Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import malmen
from malmen.config import Config, parse_config
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.files import whole_file, whole_folder
from malmen.layers import LayerSpec
from malmen.score import score
from malmen.storage import MARK, PREFIX, RunStore

if TYPE_CHECKING:
    from malmen.lm import LanguageModel

FORMAT = 1


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
    name = f"{PREFIX}{editor.steps_done:07d}"
    state = _state(editor, fingerprint, scores)
    assert keep > 0 and not state.keys() & (extra or {}).keys(), (keep, extra)
    with store.publish(name) as folder:
        save_file(_contiguous(editor.state_dict()), folder / "editor.safetensors")
        save_file(_contiguous(editor.optimizer_state()), folder / "optimizer.safetensors")
        _write_json(folder / "config.json", editor.config.model_dump(mode="json"))
        _write_json(folder / MARK, {**state, **(extra or {})})
    found = _scores(store)
    for old in list(found)[:-keep]:
        if old != _best(found):
            store.remove(old)
    return store.join(name)


@overload
def latest_checkpoint(folder: Path) -> Path: ...
@overload
def latest_checkpoint(folder: str | Path) -> str | Path: ...
def latest_checkpoint(folder: str | Path) -> str | Path:
    """The folder itself if it is a checkpoint, else the newest one in it."""
    store = RunStore(folder)
    if store.exists(MARK):
        return store.location
    found = store.checkpoints()
    if not found:
        raise EditError(
            f"{folder} holds no trained editor: expected {MARK}, or {PREFIX}* folders as `malmen train` writes"
        )
    return store.join(found[-1])


@overload
def best_checkpoint(run: Path) -> Path: ...
@overload
def best_checkpoint(run: str | Path) -> str | Path: ...
def best_checkpoint(run: str | Path) -> str | Path:
    """The one with the highest score; the newest if none was evaluated."""
    store = RunStore(run)
    best = _best(_scores(store))
    return store.join(best) if best else latest_checkpoint(run)


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


def read_state(folder: str | Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    state = _read_json(latest_checkpoint(folder), MARK)
    if state.get("format") != FORMAT:
        raise EditError(f"{folder} has checkpoint format {state.get('format')!r}; this version reads format {FORMAT}")
    return state


def read_config(folder: str | Path) -> Config:
    """The resolved config that a checkpoint was made with."""
    folder = latest_checkpoint(folder)
    return parse_config(_read_json(folder, "config.json"), str(RunStore(folder).join("config.json")))


def save_edit(folder: Path, shifts: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """The shifts of an edit with what they belong to."""
    with whole_folder(folder, replaces="edit.json") as fresh:
        save_file(_contiguous({name: shift.float() for name, shift in shifts.items()}), fresh / "shifts.safetensors")
        _write_json(fresh / "edit.json", {"format": FORMAT, **manifest})


def load_edit(folder: Path, lm: LanguageModel | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Shifts and manifest; refused for another base model."""
    if not (folder / "edit.json").exists():
        raise EditError(f"{folder} holds no edit: expected edit.json and shifts.safetensors as `malmen edit` writes")
    manifest = _read_json(folder, "edit.json")
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


def _scores(store: RunStore) -> dict[str, float | None]:
    """By checkpoint, the newest last; one that cannot be read now is left out, and so is neither best nor removed."""
    found: dict[str, float | None] = {}
    for name in store.checkpoints():
        with suppress(EditError):
            found[name] = read_state(store.join(name)).get("score")
    return found


def _best(found: dict[str, float | None]) -> str | None:
    """The name with the highest score, the newest of equals."""
    scored = {name: value for name, value in reversed(found.items()) if value is not None}
    return max(scored, key=lambda name: scored[name], default=None)


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


def _read_json(folder: str | Path, name: str) -> dict[str, Any]:
    path = RunStore(folder).join(name)
    try:
        found = json.loads(RunStore(folder).read_text(name))
    except OSError as error:
        raise EditError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise EditError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise EditError(f"{path} holds a {type(found).__name__}; expected an object")
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    whole_file(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

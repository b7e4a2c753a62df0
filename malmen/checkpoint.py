"""Folders of safetensors and JSON that hold a trained editor, or an edit.

A folder is written under a temporary name and renamed when whole, so a killed process leaves the
earlier one. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import malmen
from malmen.config import Config, parse_config
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.files import whole_file, whole_folder
from malmen.layers import LayerSpec
from malmen.lm import LanguageModel

FORMAT = 1
_PREFIX = "checkpoint-"


def save_checkpoint(run: Path, editor: Editor, fingerprint: str, scores: dict[str, Any] | None = None) -> Path:
    """`run/checkpoint-STEP` with θ, normalisers, Adam and all that is needed to go on; keeps the newest two."""
    target = run / f"{_PREFIX}{editor.steps_done:07d}"
    with whole_folder(target, replaces="state.json") as folder:
        save_file(_contiguous(editor.state_dict()), folder / "editor.safetensors")
        save_file(_optimizer_tensors(editor), folder / "optimizer.safetensors")
        _write_json(folder / "config.json", editor.config.model_dump(mode="json"))
        state = {
            "format": FORMAT,
            "step": editor.steps_done,  # with the seed it fixes the data position: sampling draws by step number
            "seed": editor.config.seed,
            "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
            "base_model": fingerprint,
            "layers": [vars(layer) for layer in editor.layers],
            "scores": scores or {},
            "versions": {
                "malmen": malmen.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        _write_json(folder / "state.json", state)
    for old in _checkpoints(run)[:-2]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: Path) -> Path:
    """The folder itself if it is a checkpoint, else the newest one in it."""
    if (folder / "state.json").exists():
        return folder
    found = _checkpoints(folder)
    if not found:
        raise EditError(
            f"{folder} holds no trained editor: expected state.json, or {_PREFIX}* folders as `malmen train` writes"
        )
    return found[-1]


def load_editor(folder: Path, lm: LanguageModel | None = None, *, optimizer: bool = False) -> Editor:
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
    _load_into(editor, _load_tensors(folder / "editor.safetensors"), folder)
    editor.steps_done = state["step"]
    editor.base_model = state["base_model"]
    if lm is not None:
        editor.to(lm.device)
    if optimizer:
        _restore_optimizer(editor, _load_tensors(folder / "optimizer.safetensors"))
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))
    return editor


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    state = _read_json(latest_checkpoint(folder) / "state.json")
    if state.get("format") != FORMAT:
        raise EditError(f"{folder} has checkpoint format {state.get('format')!r}; this version reads format {FORMAT}")
    return state


def read_config(folder: Path) -> Config:
    """The resolved config that a checkpoint was made with."""
    path = latest_checkpoint(folder) / "config.json"
    return parse_config(_read_json(path), str(path))


def save_edit(folder: Path, shifts: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """The shifts of an edit with what they belong to."""
    with whole_folder(folder, replaces="edit.json") as fresh:
        save_file(_contiguous({name: shift.float() for name, shift in shifts.items()}), fresh / "shifts.safetensors")
        _write_json(fresh / "edit.json", {"format": FORMAT, **manifest})


def load_edit(folder: Path, lm: LanguageModel | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Shifts and manifest; refused for another base model."""
    if not (folder / "edit.json").exists():
        raise EditError(f"{folder} holds no edit: expected edit.json and shifts.safetensors as `malmen edit` writes")
    manifest = _read_json(folder / "edit.json")
    if manifest.get("format") != FORMAT or "base_model" not in manifest:
        raise EditError(f"{folder}/edit.json has format {manifest.get('format')!r}; this version reads format {FORMAT}")
    if lm is not None and lm.fingerprint() != manifest["base_model"]:
        raise EditError(
            f"the edit in {folder} belongs to base model {manifest['base_model']}; this one is {lm.fingerprint()}"
        )
    return _load_tensors(folder / "shifts.safetensors"), manifest


# --- pieces ------------------------------------------------------------------------------------------


def _checkpoints(run: Path) -> list[Path]:
    return sorted(path for path in run.glob(f"{_PREFIX}*") if (path / "state.json").exists())


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise EditError(
            f"cannot read {path}: {error}; the file is damaged or incomplete, use an earlier checkpoint"
        ) from error


def _load_into(editor: Editor, tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        editor.load_state_dict(tensors)
    except RuntimeError as error:
        raise EditError(
            f"the tensors in {folder} do not fit its config: {' '.join(str(error).split())[:300]}"
        ) from error


def _optimizer_tensors(editor: Editor) -> dict[str, Tensor]:
    state = editor.optimizer().state
    return _contiguous(
        {
            f"{name}/{slot}": value
            for name, parameter in editor.named_parameters()
            for slot, value in state.get(parameter, {}).items()
        }
    )


def _restore_optimizer(editor: Editor, tensors: dict[str, Tensor]) -> None:
    state = editor.optimizer().state
    for name, parameter in editor.named_parameters():
        slots = {
            key.rsplit("/", 1)[1]: value.to(parameter.device)
            for key, value in tensors.items()
            if key.rsplit("/", 1)[0] == name
        }
        if slots:
            state[parameter] = slots


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EditError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise EditError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise EditError(f"{path} holds a {type(found).__name__}; expected an object")
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    whole_file(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

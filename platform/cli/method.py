"""The editing method that a command was given: a trained editor, or one that needs only a model and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malmen.errors import UsageError
from malmen.methods.registry import METHODS
from malmen.platform.cli.options import resolve_config
from malmen.platform.cli.progress import status

if TYPE_CHECKING:
    from malmen.config import Config
    from malmen.edit_method import EditMethod
    from malmen.lm.model import LanguageModel


@dataclass(frozen=True)
class LoadedMethod:
    """An editing method with its base model, ready to edit."""

    lm: LanguageModel
    method: EditMethod
    config: Config
    about: dict[str, Any]  # for the manifest of an edit


def check_method(method: str | None, editor: str | None, config: str | None, overrides: Sequence[str]) -> None:
    """UsageError for options that contradict each other; reads no file."""
    if method is not None and method not in METHODS:
        raise UsageError(f"unknown method {method!r}; the methods are {', '.join(METHODS)}")
    trained = method is None or METHODS[method].trained
    if trained and editor is None:
        raise UsageError(f"--method {method or 'malmen'} needs a trained editor: --editor RUN")
    only_placement = all(override.startswith(("model.device=", "model.dtype=")) for override in overrides)
    if trained and (config or not only_placement):
        raise UsageError(
            "a trained editor brings its own settings: --config and key=value are for other methods, "
            "except model.device and model.dtype"
        )
    if config and editor:
        raise UsageError("--config and --editor exclude each other: the settings are those of one of them")


def load_method(
    method: str | None, editor: str | None, config: str | None, overrides: Sequence[str], model: str | None
) -> LoadedMethod:
    """Load the base model, and the editor or untrained method that edits it."""
    check_method(method, editor, config, overrides)
    from malmen.config import full_key, load_config, parse_config, read_override, set_key
    from malmen.lm.model import load_lm
    from malmen.runs.checkpoint import load_editor
    from malmen.runs.checkpoint_lookup import read_config, read_state

    folder = editor_folder(editor) if editor else None
    if folder is None:
        settings = load_config(resolve_config(config or "builtin"), overrides)
    else:
        raw = read_config(folder).model_dump(mode="json")
        for key, value in map(read_override, overrides):
            set_key(raw, full_key(key), value)
        settings = parse_config(raw, "the overrides")
    trained_as = "mend" if settings.editor.aggregation == "sum" else "malmen"
    make = None if method is None else METHODS[method].make
    if method is not None and make is None and method != trained_as:
        raise UsageError(f"the editor in {editor} was trained as {trained_as}, not as {method}")
    if model:  # an edit's manifest names the model that was loaded
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"name": model})})
    with status("loading the model"):
        lm = load_lm(settings.model)
    if method is None or make is None:
        assert folder is not None
        about = {"method": trained_as, "folder": str(editor), "step": read_state(folder)["step"]}
        return LoadedMethod(lm, load_editor(folder, lm), settings, about)
    about = {"method": method, "settings": METHODS[method].settings(settings)}
    return LoadedMethod(lm, make(lm, settings), settings, about)


def editor_folder(editor: str) -> str | Path:
    """The folder or storage URL of an editor; one of the model registry is downloaded."""
    if not editor.startswith("models:/"):
        return editor
    from malmen.platform.tracking.registry import download_editor

    return download_editor(editor)

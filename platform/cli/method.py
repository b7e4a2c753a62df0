"""Which way of editing a command was asked for, and what it needs: a trained editor, or a model and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmen.errors import UsageError
from malmen.methods.registry import METHODS
from malmen.platform.cli.options import resolve_config

if TYPE_CHECKING:
    from malmen.config import Config
    from malmen.edit_method import EditMethod
    from malmen.lm.model import LanguageModel

EditorFolder = Annotated[
    str | None,
    typer.Option(
        "--editor",
        help="a run or checkpoint of `malmen train`, RUN@best, or models:/NAME/VERSION or @ALIAS of the registry",
    ),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="the base model, where it lies elsewhere than the config says")
]
Method = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(name for name, method in METHODS.items() if not method.trained)} need no --editor; "
        "default: what the --editor was trained as"
    ),
]
ConfigName = Annotated[
    str | None, typer.Option("--config", help="for a method without an --editor: a YAML file, or a shipped config")
]


@dataclass(frozen=True)
class Loaded:
    """A way of editing, ready to be used."""

    lm: LanguageModel
    method: EditMethod
    config: Config
    about: dict[str, Any]  # for the manifest of an edit


def check_method(method: str | None, editor: str | None, config: str | None, overrides: Sequence[str]) -> None:
    """Wrong usage is told before anything is loaded."""
    if method is not None and method not in METHODS:
        raise UsageError(f"there is no method {method!r}; the methods are {', '.join(METHODS)}")
    trained = method is None or METHODS[method].trained
    if trained and editor is None:
        raise UsageError(f"--method {method or 'malmen'} needs a trained editor: --editor RUN")
    elsewhere = all(override.startswith(("model.device=", "model.dtype=")) for override in overrides)
    if trained and (config or not elsewhere):
        raise UsageError(
            "a trained editor brings its own settings: --config and key=value are for other methods, "
            "but for model.device and model.dtype"
        )
    if config and editor:
        raise UsageError("--config and --editor exclude each other: the settings are those of one of them")


def load_method(
    method: str | None, editor: str | None, config: str | None, overrides: Sequence[str], model: str | None
) -> Loaded:
    """The base model and the way of editing it."""
    from malmen.config import full_key, load_config, parse_config, read_override, set_key
    from malmen.lm.model import load_lm
    from malmen.platform.cli.output import err
    from malmen.runs.checkpoint import load_editor
    from malmen.runs.checkpoint_lookup import read_config, read_state

    check_method(method, editor, config, overrides)
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
    if model:  # what an edit's manifest names is what was loaded
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"name": model})})
    with err.status("loading the model"):
        lm = load_lm(settings.model)
    if method is None or make is None:
        assert folder is not None
        about = {"method": trained_as, "folder": str(editor), "step": read_state(folder)["step"]}
        return Loaded(lm, load_editor(folder, lm), settings, about)
    about = {"method": method, "settings": METHODS[method].settings(settings)}
    return Loaded(lm, make(lm, settings), settings, about)


def editor_folder(editor: str) -> str | Path:
    """Where an editor lies; one of the model registry is fetched."""
    if not editor.startswith("models:/"):
        return editor
    from malmen.platform.tracking.registry import download_editor

    return download_editor(editor)

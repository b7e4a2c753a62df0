"""Arguments and options that several commands take; nothing here imports more than the command line itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from malmen.errors import UsageError
from malmen.methods.registry import METHODS

CONFIGS = Path(__file__).parent.parent / "configs"
REGISTRY = "models:/"  # before the name of an editor in MLflow's registry

ConfigName = Annotated[str, typer.Argument(help="a YAML file, or a shipped config (`malmen configs` lists them)")]
Overrides = Annotated[list[str] | None, typer.Argument(help="settings as key=value, e.g. training.steps=100")]
PLACEMENT = ("model.device", "model.dtype", "model.float32_products")  # settings that leave an editor what it is
_ONLY_PLACEMENT = f"only {'=…, '.join(PLACEMENT)}=…"
PlacementOverrides = Annotated[
    list[str] | None, typer.Argument(help=f"{_ONLY_PLACEMENT}; all other settings are the editor's")
]
MethodOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        help=f"settings as key=value: with a trained editor {_ONLY_PLACEMENT}; with a --method that needs no --editor "
        "any, e.g. baselines.ft.epochs=10 (`malmen settings` lists them)"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on standard output")]
Address = Annotated[
    str | None, typer.Option(help="of a Ray cluster (HOST:PORT or `auto`); default: RAY_ADDRESS, else a local one")
]
EditFolder = Annotated[Path, typer.Option(help="a folder that `malmen edit` wrote")]
EditorFolder = Annotated[
    str | None,
    typer.Option(
        "--editor",
        help="a run or checkpoint of `malmen train`, RUN@best, or models:/NAME/VERSION or @ALIAS of the registry",
    ),
]
ModelName = Annotated[str | None, typer.Option("--model", help="the base model, if it is not where the config says")]
_METHOD_HELP = "{} need no --editor; default: what the --editor was trained as"
_UNTRAINED = [method for method in METHODS.values() if not method.trained]
Method = Annotated[str | None, typer.Option(help=_METHOD_HELP.format(", ".join(method.name for method in _UNTRAINED)))]
WeightsMethod = Annotated[  # of a command that saves the edit
    str | None,
    typer.Option(help=_METHOD_HELP.format(", ".join(method.name for method in _UNTRAINED if method.weights))),
]
MethodConfig = Annotated[
    str | None, typer.Option("--config", help="for a method without an --editor: a YAML file, or a shipped config")
]
InContext = Annotated[
    bool, typer.Option("--in-context", help="also ask the edits behind a neutral sentence and behind their old answer")
]
Deployed = Annotated[
    bool,
    typer.Option(
        "--deployed",
        help="also compare answers as a user gets them: in the chat template, cut where they end, as texts",
    ),
]
Generate = Annotated[bool, typer.Option(help="also compare generated answers")]


class RunByDefault(TyperGroup):
    """`malmen sweep CONFIG` is `malmen sweep run CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


def resolve_config(name: str) -> Path:
    """A config file by path, or a shipped one by name."""
    return shipped_file(CONFIGS, name, "config")


def shipped_file(folder: Path, name: str, what: str) -> Path:
    """A YAML file: `name` as a path, else the one of that name in `folder`."""
    if (path := Path(name)).is_file():
        return path
    if not (shipped := folder / f"{name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise UsageError(f"no {what} {name!r}: neither a file nor one of those shipped ({known})")
    return shipped

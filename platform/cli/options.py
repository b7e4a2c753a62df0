"""What several commands take: settings, a config by name, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from malmen.errors import UsageError

CONFIGS = Path(__file__).parent.parent / "configs"

Overrides = Annotated[list[str] | None, typer.Argument(help="settings as key=value, e.g. training.steps=100")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on standard output")]


class RunByDefault(TyperGroup):
    """`malmen sweep CONFIG` is `malmen sweep run CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


def resolve_config(name: str) -> Path:
    """A config file by path, or one that is shipped by name."""
    if Path(name).is_file():
        return Path(name)
    shipped = CONFIGS / f"{name}.yaml"
    if not shipped.exists():
        known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        raise UsageError(f"no config {name!r}: neither a file nor one of those shipped ({known})")
    return shipped

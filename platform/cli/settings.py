"""What can be chosen: `malmen configs` lists the shipped configs, `malmen settings` every setting."""

from __future__ import annotations

from typing import Any

import typer

from malmen.platform.cli.options import CONFIGS, AsJson
from malmen.platform.cli.output import err, out, show_settings


def configs() -> None:
    """List the shipped configs."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        out.print(f"{path.stem:14} {title}", highlight=False)


def settings(context: typer.Context, as_json: AsJson = False) -> None:
    """List every setting of a run with its default, and the commands that list those of sweeps and endpoints."""
    from malmen.config import describe_settings

    show_settings(describe_settings(), as_json)
    for name, help_text in _other_settings(context.find_root().command):
        err.print(f"`malmen {name} settings`: {help_text}", highlight=False, soft_wrap=True)


def _other_settings(root: Any) -> list[tuple[str, str]]:
    """The groups of commands that have settings of their own, which other rooms define, with their help."""
    groups = {name: getattr(group, "commands", {}) for name, group in root.commands.items()}
    return [(name, commands["settings"].help) for name, commands in groups.items() if "settings" in commands]

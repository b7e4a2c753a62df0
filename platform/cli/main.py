"""The command `malmen`: every command by name, logging, and exit codes."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated

import typer

from malmen import __version__
from malmen.errors import EditError
from malmen.platform.cli.capacity import capacity
from malmen.platform.cli.data import classifier_app, data_app, world_app
from malmen.platform.cli.edit import edit, evaluate, generate
from malmen.platform.cli.export import export
from malmen.platform.cli.quickstart import quickstart
from malmen.platform.cli.settings import configs, plan, settings
from malmen.platform.cli.train import train

app = typer.Typer(
    help="Rewrite facts inside a language model (MALMEN).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("edit")(edit)
app.command("eval")(evaluate)
app.command("capacity")(capacity)
app.command("generate")(generate)
app.command("export")(export)
app.command("quickstart")(quickstart)
app.command("plan")(plan)
app.command("configs")(configs)
app.command("settings")(settings)
app.add_typer(data_app, name="data")
app.add_typer(world_app, name="world")
app.add_typer(classifier_app, name="classifier")


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


def _pass_on(record: logging.LogRecord) -> bool:
    """To the log of all others. DeepSpeed, which transformers imports to save a model, writes its own to standard
    output, where programs read our JSON."""
    logging.getLogger().handle(record)
    return False


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log each stage")] = False,
    _show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("DeepSpeed").addFilter(_pass_on)
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # both are read when transformers is imported
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def add_commands(name: str, commands: typer.Typer) -> None:
    """Commands of another room, under a name; a second time changes nothing."""
    if name not in {group.name for group in app.registered_groups}:
        app.add_typer(commands, name=name)


def add_entry_points() -> None:
    """Commands of the rooms that platform/ may not import. Their modules load what they need when a command runs."""
    for entry in entry_points(group="malmen.commands"):
        add_commands(entry.name, entry.load())


def main(first: Sequence[str] = ()) -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage. `first` goes before the arguments of the command line."""
    gc.set_threshold(50_000)  # importing torch and transformers is 0.7 s faster than with Python's 700
    add_entry_points()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that files are closed and runs are ended
    try:
        app([*first, *sys.argv[1:]])  # wrong usage exits with 2 by itself
    except EditError as error:
        print(f"malmen: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"malmen: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

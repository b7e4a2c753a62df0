"""The commands of sweeps: `malmen sweep CONFIG`, `malmen sweep report DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from malmen.errors import UsageError
from malmen.platform.cli.options import AsJson, RunByDefault, resolve_config

if TYPE_CHECKING:
    from malmen.config import Config
    from malmen.tune.settings import SweepConfig

PREFIX = "sweep."


app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    help="Search layers and settings for a model: `malmen sweep CONFIG`. Options: `malmen sweep run --help`.",
    pretty_exceptions_enable=False,
)


@app.command("run")
def run(
    config: Annotated[str, typer.Argument(help="a YAML file, or a shipped config (`malmen configs` lists them)")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="settings of all trials as key=value, and of the sweep as sweep.key=value"),
    ] = None,
    space: Annotated[
        str | None, typer.Option(help="a YAML file of what is tried, or a shipped one: default, builtin")
    ] = None,
    out: Annotated[str, typer.Option(help="the sweep's folder; on a cluster a shared one")] = "runs/sweep",
    address: Annotated[
        str | None, typer.Option(help="of a Ray cluster (HOST:PORT or `auto`); default: RAY_ADDRESS, else a local one")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try layers and settings, stop what is weak, register the best editor, and report.

    The same command again goes on with an unfinished sweep: no trial is lost, and none is run twice.
    """
    settings, searched = load(config, space, overrides or [])  # before what takes seconds to import
    from malmen.tune.output import show_sweep, sweep_progress
    from malmen.tune.results import sweep_results
    from malmen.tune.sweep import sweep
    from malmen.tune.sweep_folder import SweepFolder

    with sweep_progress() as listener:
        found = sweep(settings, searched, out, address=address, listener=listener)
    facts = {"report": str(found.report), "seconds": round(found.seconds, 1)}
    show_sweep({**sweep_results(SweepFolder(found.folder)), **facts}, as_json)


@app.command("report")
def report(
    folder: Annotated[Path, typer.Argument(help="of a sweep")],
    as_json: AsJson = False,
) -> None:
    """Build the report of a sweep again, finished or not."""
    from malmen.tune.output import show_sweep
    from malmen.tune.report import write_report
    from malmen.tune.results import sweep_results
    from malmen.tune.sweep_folder import SweepFolder

    page = write_report(SweepFolder(folder))
    show_sweep({**sweep_results(SweepFolder(folder)), "report": str(page)}, as_json)


def load(config: str, space: str | None, overrides: list[str]) -> tuple[Config, SweepConfig]:
    """The trials' common config and the sweep: files first, then the space's `settings`, then the command line."""
    from malmen.config import load_config
    from malmen.tune.settings import load_sweep

    searched = load_sweep(
        _space_file(space), [item.removeprefix(PREFIX) for item in overrides if item.startswith(PREFIX)]
    )
    given = [item for item in overrides if not item.startswith(PREFIX)]
    return load_config(resolve_config(config), given, searched.settings), searched


def _space_file(name: str | None) -> Path | None:
    from malmen.tune.settings import SPACES

    if name is None or Path(name).is_file():
        return None if name is None else Path(name)
    shipped = SPACES / f"{name}.yaml"
    if not shipped.exists():
        known = ", ".join(sorted(path.stem for path in SPACES.glob("*.yaml")))
        raise UsageError(f"no space {name!r}: neither a file nor one of those shipped ({known})")
    return shipped


def main() -> None:
    """`python -m malmen.tune.sweep CONFIG …`, the entry of a Ray job."""
    from malmen.platform.cli.main import add_commands
    from malmen.platform.cli.main import main as malmen

    add_commands("sweep", app)  # a job's copy of the sources is not installed, so nobody else does
    malmen(["sweep"])

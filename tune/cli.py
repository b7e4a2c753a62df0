"""`malmen sweep`: run a sweep, report it, list its settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from malmen.platform.cli.options import Address, AsJson, ConfigName, RunByDefault, resolve_config
from malmen.platform.cli.progress import slow_import, status

if TYPE_CHECKING:
    from malmen.config import Config
    from malmen.tune.settings import SweepConfig

SWEEP_SECTION = "sweep."  # before a setting of the sweep, among those of the trials

app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    help="Search layers and settings for a model: `malmen sweep CONFIG`. Options: `malmen sweep run --help`.",
)


@app.command("run")
def run(
    config: ConfigName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="settings of all trials as key=value, of the sweep as sweep.key=value"),
    ] = None,
    space: Annotated[
        str, typer.Option(help="a YAML file of what is tried, or a shipped one: default, builtin")
    ] = "default",
    out: Annotated[str, typer.Option(help="the sweep's folder; on a cluster a shared one")] = "runs/sweep",
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Try layers and settings, stop weak trials early, register the best editor, and write a report.

    The same command again resumes an unfinished sweep: no trial is lost, and none runs twice.
    """
    settings, searched = load(config, space, overrides or [])  # wrong usage fails before the slow imports
    slow_import("malmen.tune.sweep")
    from malmen.tune.output import progress, show_sweep
    from malmen.tune.report import sweep_results
    from malmen.tune.sweep import sweep
    from malmen.tune.sweep_folder import SweepFolder

    with progress("trials") as listener:
        result = sweep(settings, searched, out, address=address, listener=listener)
    facts = {"report": str(result.report), "seconds": round(result.seconds, 1)}
    show_sweep({**sweep_results(SweepFolder(result.folder)), **facts}, as_json)


@app.command("report")
def report(
    folder: Annotated[Path, typer.Argument(help="the folder of a sweep")],
    as_json: AsJson = False,
) -> None:
    """Write the report of a sweep again, finished or not."""
    slow_import("malmen.tune.report")
    from malmen.tune.output import show_sweep
    from malmen.tune.report import sweep_results, write_report
    from malmen.tune.sweep_folder import SweepFolder

    sweep = SweepFolder(folder)
    with status("writing the report"):
        page = write_report(sweep)
    show_sweep({**sweep_results(sweep), "report": str(page)}, as_json)


@app.command("settings")
def settings(as_json: AsJson = False) -> None:
    """List every setting of a sweep with its default; any can be given as sweep.key=value, or in the space's file."""
    from malmen.config import describe_settings
    from malmen.platform.cli.output import show_settings
    from malmen.tune.settings import SweepConfig

    show_settings(describe_settings(SweepConfig, SWEEP_SECTION), as_json)


def load(config: str, space: str, overrides: list[str]) -> tuple[Config, SweepConfig]:
    """The trials' common config and the sweep: files first, then the space's `settings`, then the command line."""
    from malmen.config import load_config
    from malmen.tune.settings import load_sweep

    of_sweep = [item.removeprefix(SWEEP_SECTION) for item in overrides if item.startswith(SWEEP_SECTION)]
    of_trials = [item for item in overrides if not item.startswith(SWEEP_SECTION)]
    searched = load_sweep(space, of_sweep)
    return load_config(resolve_config(config), of_trials, searched.settings), searched


def main() -> None:
    """`python -m malmen.tune.sweep CONFIG …`, the entry of a Ray job."""
    from malmen.platform.cli.main import add_commands
    from malmen.platform.cli.main import main as malmen

    add_commands("sweep", app)  # a job's copy of the sources is not installed: it has no entry points
    malmen(["sweep"])

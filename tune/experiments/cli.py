"""`malmen experiment`: the paper's comparisons, each one command, and all of them as a report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmen.errors import EditError, UsageError
from malmen.platform.cli.options import AsJson

if TYPE_CHECKING:
    from malmen.tune.experiments.runner import ExperimentListener

app = typer.Typer(
    no_args_is_help=True,
    help="MALMEN and its rivals on the same facts: `malmen experiment report --preset world`.",
    pretty_exceptions_enable=False,
)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="settings of the editor's config as key=value, of the experiment as experiment.key=value"),
]
Preset = Annotated[str, typer.Option(help="a YAML file, or a shipped one: world, fast, beyond, default")]
Out = Annotated[Path, typer.Option(help="the folder; the same command again goes on there")]
Address = Annotated[
    str | None, typer.Option(help="of a Ray cluster (HOST:PORT or `auto`); default: RAY_ADDRESS, else a local one")
]
_HELP = {
    "scaling": "ES, GS and LS over the number of edits, for all methods (Figs. 5-8).",
    "ablation": "MALMEN with one thing changed: sum, no regularisation, the other FC, the other tokens (Tables 1, 2).",
    "cancellation": "The mean residual over the number of edits, least squares beside a sum (Fig. 9).",
    "rounds": "Editing in rounds: one set of all facts, or the edited model again and again.",
    "memory": "Peak memory over the number of edits, one graph beside the decomposed step (Fig. 10).",
    "recipes": "MALMEN with other settings, those of experiment.recipes, beside MALMEN as it is.",
    "failures": "Rows where the edit, the rephrasing or an unrelated answer went wrong, with the texts.",
}


def _run(
    kinds: tuple[str, ...], preset: str, overrides: list[str] | None, out: Path, address: str | None
) -> list[Path]:
    from malmen.tune.experiments.settings import load_experiment

    settings = load_experiment(preset, overrides or [])
    if "recipes" in kinds and not settings.recipes:
        if len(kinds) == 1:
            raise UsageError("no recipes to compare: name a preset that has some, or set experiment.recipes")
        kinds = tuple(kind for kind in kinds if kind != "recipes")
    from malmen.tune.experiments.runner import run_experiments

    with _progress() as listener:
        return run_experiments(settings, kinds, out, address=address, listener=listener)


@contextmanager
def _progress() -> Iterator[ExperimentListener]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from malmen.platform.cli.output import err
    from malmen.tune.experiments.runner import ExperimentListener

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
        task = progress.add_task("measurements", total=None)
        yield ExperimentListener(
            lambda done, total: progress.update(task, completed=done, total=total),
            lambda text: err.print(text, highlight=False, soft_wrap=True),
        )


def _add(kind: str) -> None:
    def command(
        overrides: Overrides = None,
        preset: Preset = "world",
        out: Out = Path("runs/experiment"),
        address: Address = None,
        as_json: AsJson = False,
    ) -> None:
        (path,) = _run((kind,), preset, overrides, out, address)
        picture = path.with_suffix(".png")
        _show({"results": str(path), **({"picture": str(picture)} if picture.exists() else {})}, as_json)

    command.__doc__ = _HELP[kind]
    app.command(kind)(command)


for _kind in _HELP:
    _add(_kind)


@app.command("settings")
def settings(as_json: AsJson = False) -> None:
    """List every setting of an experiment with its default; any can be given as experiment.key=value."""
    from malmen.config import describe_settings
    from malmen.platform.cli.output import show_settings
    from malmen.tune.experiments.settings import PREFIX, ExperimentConfig

    rows = describe_settings(ExperimentConfig)
    show_settings([{**row, "key": f"{PREFIX}{row['key']}"} for row in rows], as_json)


@app.command("report")
def report(
    overrides: Overrides = None,
    preset: Preset = "world",
    out: Out = Path("runs/experiment"),
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """All experiments, and one page that shows them."""
    import json

    from malmen.tune.experiments.findings import findings
    from malmen.tune.experiments.report import write_report
    from malmen.tune.experiments.settings import KINDS

    began = time.perf_counter()
    try:
        written = _run(KINDS, preset, overrides, out, address)
    except EditError as error:
        if isinstance(error, UsageError) or not (out / "results").is_dir():
            raise
        page = write_report(out.absolute())  # of what there is
        raise EditError(f"{error}; what there is stands in {page}") from error
    page = write_report(out.absolute())
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in written}
    told = [{"expected": text, "holds": held} for text, held in findings(found)]
    _show({"report": str(page), "seconds": round(time.perf_counter() - began, 1), "findings": told}, as_json)


def _show(found: dict[str, Any], as_json: bool) -> None:
    from malmen.platform.cli.output import out, print_json

    if as_json:
        print_json(found)
        return
    for row in found.pop("findings", []):
        out.print(("holds: " if row["holds"] else "DOES NOT HOLD: ") + row["expected"], highlight=False)
    for name, value in found.items():
        out.print(f"{name}: {value}", highlight=False, soft_wrap=True)

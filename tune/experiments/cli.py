"""`malmen experiment`: the paper's comparisons, one command each, and a report of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
Out = Annotated[Path, typer.Option(help="the folder; the same command again resumes there")]
Address = Annotated[
    str | None, typer.Option(help="of a Ray cluster (HOST:PORT or `auto`); default: RAY_ADDRESS, else a local one")
]
_HELP = {
    "scaling": "ES, GS and LS over the number of edits, for all methods (Figs. 5-8).",
    "ablation": "MALMEN with one change: sum, no regularisation, the other FC, the other tokens (Tables 1, 2).",
    "cancellation": "The mean residual over the number of edits, least squares beside a sum (Fig. 9).",
    "rounds": "Editing in rounds: one set of all facts, or the edited model edited again.",
    "memory": "Peak memory over the number of edits, one graph beside the decomposed step (Fig. 10).",
    "recipes": "MALMEN with the settings of experiment.recipes, beside MALMEN as it is.",
    "failures": "Rows where the edit, the rephrasing or an unrelated answer went wrong, with the texts.",
}


def _run(kinds: tuple[str, ...], preset: str, overrides: list[str], out: Path, address: str | None) -> list[Path]:
    from malmen.tune.experiments.settings import load_experiment

    settings = load_experiment(preset, overrides)
    if "recipes" in kinds and not settings.recipes:
        if len(kinds) == 1:
            raise UsageError("no recipes to compare: name a preset that has recipes, or set experiment.recipes")
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


def _add(name: str, help: str, run: Callable[[str, list[str], Path, str | None], dict[str, Any]]) -> None:
    def command(
        overrides: Overrides = None,
        preset: Preset = "world",
        out: Out = Path("runs/experiment"),
        address: Address = None,
        as_json: AsJson = False,
    ) -> None:
        _show(run(preset, overrides or [], out, address), as_json)

    app.command(name, help=help)(command)


def _run_kind(kind: str, preset: str, overrides: list[str], out: Path, address: str | None) -> dict[str, Any]:
    (path,) = _run((kind,), preset, overrides, out, address)
    picture = path.with_suffix(".png")
    return {"results": str(path), **({"picture": str(picture)} if picture.exists() else {})}


def _run_all(preset: str, overrides: list[str], out: Path, address: str | None) -> dict[str, Any]:
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
        page = write_report(out.absolute())
        raise EditError(f"{error}; the report of what was measured is {page}") from error
    page = write_report(out.absolute())
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in written}
    checks = [{"expected": text, "holds": held} for text, held in findings(results)]
    return {"report": str(page), "seconds": round(time.perf_counter() - began, 1), "findings": checks}


def _show(summary: dict[str, Any], as_json: bool) -> None:
    from malmen.platform.cli.output import out, print_json

    if as_json:
        print_json(summary)
        return
    for row in summary.pop("findings", []):
        out.print(("holds: " if row["holds"] else "DOES NOT HOLD: ") + row["expected"], highlight=False)
    for name, value in summary.items():
        out.print(f"{name}: {value}", highlight=False, soft_wrap=True)


for _kind in _HELP:
    _add(_kind, _HELP[_kind], partial(_run_kind, _kind))


@app.command("settings")
def settings(as_json: AsJson = False) -> None:
    """List every setting of an experiment with its default; any can be given as experiment.key=value."""
    from malmen.config import describe_settings
    from malmen.platform.cli.output import show_settings
    from malmen.tune.experiments.settings import KEY_PREFIX, ExperimentConfig

    rows = describe_settings(ExperimentConfig)
    show_settings([{**row, "key": f"{KEY_PREFIX}{row['key']}"} for row in rows], as_json)


_add("report", "Run all experiments and write one page that shows them.", _run_all)

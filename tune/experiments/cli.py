"""`malmen experiment`: the paper's comparisons, one command each, and a report of all of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from malmen.errors import EditError, UsageError
from malmen.platform.cli.options import Address, AsJson
from malmen.platform.cli.progress import slow_import

app = typer.Typer(
    no_args_is_help=True,
    help="MALMEN and its rivals on the same facts: `malmen experiment report --preset world`.",
)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="settings of the editor's config as key=value, of the experiment as experiment.key=value"),
]
Preset = Annotated[str, typer.Option(help="a YAML file, or a shipped one: world, fast, beyond, default")]
Out = Annotated[Path, typer.Option(help="the folder; the same command again resumes there")]
_HELP = {
    "scaling": "ES, GS and LS over the number of edits, for all methods (Figs. 5-8).",
    "ablation": "MALMEN with one change: sum, no regularisation, the other FC, the other tokens (Tables 1, 2).",
    "cancellation": "The mean residual over the number of edits, least squares beside a sum (Fig. 9).",
    "rounds": "Editing in rounds: one set of all facts, or the edited model edited again.",
    "memory": "Peak memory over the number of edits, one graph beside the decomposed step (Fig. 10).",
    "recipes": "MALMEN with the settings of experiment.recipes, beside MALMEN as it is.",
    "tradeoff": "GS over the drift along the model's own texts, for all methods and experiment.recipes.",
    "failures": "Rows where the edit, the rephrasing or an unrelated answer went wrong, with the texts.",
    "report": "Run all experiments and write one page that shows them.",
}


def _add_command(name: str) -> None:
    @app.command(name, help=_HELP[name])
    def command(
        overrides: Overrides = None,
        preset: Preset = "world",
        out: Out = Path("runs/experiment"),
        address: Address = None,
        as_json: AsJson = False,
    ) -> None:
        from malmen.tune.experiments.settings import KINDS, load_experiment

        settings = load_experiment(preset, overrides or [])  # wrong usage fails before the slow imports
        kinds: tuple[str, ...] = KINDS if name == "report" else (name,)
        if not settings.recipes:
            if name == "recipes":
                raise UsageError("no recipes to compare: name a preset that has recipes, or set experiment.recipes")
            kinds = tuple(kind for kind in kinds if kind != "recipes")
        if not settings.generate or not settings.own_texts:
            if name == "tradeoff":
                raise UsageError(
                    "drift is measured along the model's own texts: it needs experiment.generate=true and "
                    f"experiment.own_texts above 0, here {settings.generate} and {settings.own_texts}"
                )
            kinds = tuple(kind for kind in kinds if kind != "tradeoff")
        slow_import("malmen.tune.experiments.runner")
        from malmen.tune.experiments.findings import findings
        from malmen.tune.experiments.report import write_report
        from malmen.tune.experiments.runner import run_experiments
        from malmen.tune.output import progress

        began = time.perf_counter()
        try:
            with progress("measurements") as listener:
                written = run_experiments(settings, kinds, out, address=address, listener=listener)
        except EditError as error:
            if name != "report" or isinstance(error, UsageError) or not (out / "results").is_dir():
                raise
            page = write_report(out.absolute())
            raise EditError(f"{error}; the report of what was measured is {page}") from error
        if name == "report":
            page, seconds = write_report(out.absolute()), round(time.perf_counter() - began, 1)
            results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in written}
            checks = [{"expected": text, "holds": held} for text, held in findings(results)]
            summary: dict[str, Any] = {"report": str(page), "seconds": seconds, "findings": checks}
        else:
            (path,) = written
            picture = path.with_suffix(".png")
            summary = {"results": str(path), **({"picture": str(picture)} if picture.exists() else {})}
        _show(summary, as_json)


def _show(summary: dict[str, Any], as_json: bool) -> None:
    from malmen.platform.cli.output import out, print_json

    if as_json:
        print_json(summary)
        return
    for row in summary.pop("findings", []):
        out.print(("holds: " if row["holds"] else "DOES NOT HOLD: ") + row["expected"])
    for name, value in summary.items():
        out.print(f"{name}: {value}", soft_wrap=True)


@app.command("settings")
def settings(as_json: AsJson = False) -> None:
    """List every setting of an experiment with its default; any can be given as experiment.key=value."""
    from malmen.config import describe_settings
    from malmen.platform.cli.output import show_settings
    from malmen.tune.experiments.settings import KEY_PREFIX, ExperimentConfig

    show_settings(describe_settings(ExperimentConfig, KEY_PREFIX), as_json)


for _name in _HELP:
    _add_command(_name)

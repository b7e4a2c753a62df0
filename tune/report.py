"""The report of a sweep: its results as plain values, its pictures, and one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from malmen.metrics import METRICS
from malmen.platform.tracking.store import redact_credentials
from malmen.runs.files import atomic_file, atomic_folder, write_json
from malmen.tune.settings import LAYERS, Range, SweepConfig
from malmen.tune.sweep_folder import SweepFolder, TrialRecord

REPORT = "report.html"
SHARES = {metric.label: metric.name for metric in METRICS}
Rows = Sequence[dict[str, Any]]
_MARKERS = {"finished": ("o", 1.0), "stopped": ("x", 0.6), "failed": ("v", 0.6), "planned": (".", 0.4)}
_COLOURS = {"finished": "C2", "stopped": "C1", "failed": "C3", "planned": "0.7"}


def write_report(folder: SweepFolder) -> Path:
    """Build the report from the records in the folder, in place of an earlier one; the path of the HTML file."""
    results = sweep_results(folder)
    statuses = [row["status"] for row in results["trials"]]
    columns = [name for name in (results["trials"] or [{}])[0] if name not in ("tracking_run", "why")]
    templates = Environment(loader=PackageLoader("malmen.tune"), autoescape=True, keep_trailing_newline=True)
    templates.filters["cell"] = _cell
    target = folder.path / "report"
    with atomic_folder(target, replaces=REPORT) as fresh:
        figures = _figures(results, folder.load()[1])
        for name, figure in figures.items():
            figure.savefig(fresh / f"{name}.png", dpi=120)
        write_json(fresh / "results.json", results)
        page = templates.get_template(REPORT).render(
            results=results,
            champion=results["champion"],
            counts={name: statuses.count(name) for name in ("finished", "stopped", "failed") if name in statuses},
            pictures={name: base64.b64encode((fresh / f"{name}.png").read_bytes()).decode() for name in figures},
            columns=[*columns, "why"],
        )
        atomic_file(fresh / REPORT, page)
    return target / REPORT


def sweep_results(folder: SweepFolder) -> dict[str, Any]:
    """The sweep, its best trial and all its trials, as in `results.json`."""
    config, sweep, facts = folder.load()
    rows = [trial_row(trial) for trial in folder.trials()]
    return {
        "model": config.model.name,
        "steps": config.training.steps,
        **sweep.model_dump(include={"search", "early_stopping", "score"}),
        "seed": config.seed,
        "champion": facts.get("champion"),
        "pareto_front": pareto_front(rows),
        "trials": rows,
        "tracking_run": facts.get("mlflow_run"),
        "tracking_uri": redact_credentials(config.tracking.uri) if config.tracking.uri else None,
    }


def trial_row(trial: TrialRecord) -> dict[str, Any]:
    """One trial at its last evaluation."""
    last = trial.last
    return {
        "number": trial.number,
        "status": trial.status,
        **trial.params,
        "step": last.step if last else 0,
        "seconds": round(last.seconds, 1) if last else 0.0,
        "score": last.score if last else None,
        **{short: last.scores.get(name) if last else None for short, name in SHARES.items()},
        "why": trial.why,
        "tracking_run": trial.tracking_run,
    }


def pareto_front(rows: Rows) -> list[int]:
    """The finished trials that no other one beats in GS or LS without being worse in the other: numbers, by GS."""
    points = {row["number"]: (row["GS"], row["LS"]) for row in rows if row["status"] == "finished"}
    points = {number: point for number, point in points.items() if None not in point}

    def is_beaten(gs: float, ls: float) -> bool:
        return any(rival != (gs, ls) and rival[0] >= gs and rival[1] >= ls for rival in points.values())

    return sorted((number for number, point in points.items() if not is_beaten(*point)), key=points.__getitem__)


def _cell(value: Any, column: str = "") -> str:
    if value is None:
        return "–"
    if column in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- pictures ----------------------------------------------------------------------------------------


def _figures(results: dict[str, Any], sweep: SweepConfig) -> dict[str, Figure]:
    """Every picture that the sweep's parameters and trials allow, by name."""
    rows = results["trials"]
    scored = [row for row in rows if row["score"] is not None]
    title = f"{len(rows)} trials; ● all steps, × stopped early"
    figures = {}
    for name, values in sweep.parameters.items():
        if isinstance(values, Range) or all(isinstance(value, int | float) for value in values):
            figures[f"score-{name}"] = _over_parameter(scored, name, values, title)
    if scored and sweep.layer_sets:
        figures["layer-sets"] = _by_layer_set(scored, title)
    figures["pareto"] = _pareto(rows, results["pareto_front"], title)
    figures["budget"] = _budget(rows, results["steps"])
    return figures


def new_figure(columns: int, width: float, height: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure of panels side by side, which needs no screen."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _over_parameter(scored: Rows, name: str, values: Range | list[Any], title: str) -> Figure:
    """The score over a numeric parameter, a colour for each layer set; crosses were stopped early."""
    figure, axes = _titled(title)
    layer_sets = sorted({row.get(LAYERS, "all trials") for row in scored})
    for row in scored:
        _mark(axes, row, row[name], row["score"], f"C{layer_sets.index(row.get(LAYERS, 'all trials'))}")
    for index, label in enumerate(layer_sets):
        axes.scatter([], [], color=f"C{index}", label=label)
    axes.set(xlabel=name, ylabel="score at the last evaluation")
    if isinstance(values, Range):
        axes.set_xlim(values.low, values.high)
        if values.log:  # also within one decade: 0.2, 0.5, 1, 2, 5
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(title="layers", fontsize="small")
    return figure


def _by_layer_set(scored: Rows, title: str) -> Figure:
    """The scores of each layer set, as boxes with the trials in them."""
    figure, axes = _titled(title)
    layer_sets = sorted({row[LAYERS] for row in scored})
    groups = [[row for row in scored if row[LAYERS] == name] for name in layer_sets]
    axes.boxplot([[row["score"] for row in group] for group in groups], tick_labels=layer_sets, showfliers=False)
    for place, group in enumerate(groups, start=1):
        for row in group:
            _mark(axes, row, place, row["score"], f"C{place - 1}")
    axes.set(xlabel="layers", ylabel="score at the last evaluation")
    axes.tick_params(axis="x", rotation=20)
    return figure


def _pareto(rows: Rows, front: Sequence[int], title: str) -> Figure:
    """GS against LS; the line joins the finished trials that none beats in both."""
    figure, axes = _titled(title)
    measured = [row for row in rows if row["GS"] is not None and row["LS"] is not None]
    for row in measured:
        _mark(axes, row, row["LS"], row["GS"], "C0")
        axes.annotate(str(row["number"]), (row["LS"], row["GS"]), xytext=(4, 4), textcoords="offset points", fontsize=8)
    line = sorted((row["LS"], row["GS"]) for row in measured if row["number"] in front)
    if line:
        axes.plot(*zip(*line, strict=True), color="C3", label="Pareto front", zorder=0)
        axes.legend(loc="lower left")
    axes.set(xlabel="LS: right answers to unrelated prompts", ylabel="GS: right answers to rephrasings")
    return figure


def _budget(rows: Rows, steps: int) -> Figure:
    """How far each trial came, and what it cost."""
    figure, (left, right) = new_figure(2, 10, 4.2)
    numbers = [row["number"] for row in rows]
    for axes, key, label in ((left, "step", "steps"), (right, "seconds", "seconds")):
        axes.barh(numbers, [row[key] for row in rows], color=[_COLOURS[row["status"]] for row in rows])
        axes.set(xlabel=label, ylabel="trial", yticks=numbers)
        axes.invert_yaxis()
    left.axvline(steps, color="0.5", linestyle=":")
    statuses = dict.fromkeys(row["status"] for row in rows)
    right.legend(handles=[Patch(color=_COLOURS[status], label=status) for status in statuses], fontsize="small")
    spent = sum(row["step"] for row in rows)
    figure.suptitle(f"{spent} of {len(rows) * steps} steps, {sum(row['seconds'] for row in rows):.0f} s", fontsize=10)
    return figure


def _titled(title: str) -> tuple[Figure, Axes]:
    figure, (axes,) = new_figure(1, 6.4, 4.2)
    axes.set_title(title, fontsize=9)
    return figure, axes


def _mark(axes: Axes, row: dict[str, Any], x: float, y: float, colour: str) -> None:
    marker, alpha = _MARKERS[row["status"]]
    axes.scatter([x], [y], marker=marker, alpha=alpha, color=colour, s=45)

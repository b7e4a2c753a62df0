"""Pictures of a sweep, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from malmen.tune.settings import LAYERS, Range, SweepConfig

Rows = Sequence[dict[str, Any]]

_MARKERS = {"finished": ("o", 1.0), "stopped": ("x", 0.6), "failed": ("v", 0.6), "planned": (".", 0.4)}


def plot_parameter(rows: Rows, name: str, values: Range | list[Any], path: Path) -> None:
    """The score over a numeric parameter, a colour for each layer set; crosses were stopped early."""
    figure, (axes,) = _figure(1)
    scored = [row for row in rows if row["score"] is not None]
    layer_sets = sorted({str(row.get(LAYERS, "")) for row in scored})
    for index, label in enumerate(layer_sets):
        for row in scored:
            if str(row.get(LAYERS, "")) == label:
                marker, alpha = _MARKERS[row["status"]]
                axes.scatter([row[name]], [row["score"]], marker=marker, alpha=alpha, color=f"C{index}", s=45)
        axes.scatter([], [], color=f"C{index}", label=label or "all trials")
    log = isinstance(values, Range) and values.log
    axes.set(xlabel=name, ylabel="score at the last evaluation", xscale="log" if log else "linear")
    if log:  # also within one decade: 0.2, 0.5, 1, 2, 5
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if isinstance(values, Range):
        axes.set_xlim(values.low, values.high)
    axes.legend(title="layers", fontsize="small")
    _add_title(axes, rows)
    figure.savefig(path, dpi=120)


def plot_layer_sets(rows: Rows, path: Path) -> None:
    """The scores of each layer set, as boxes with the trials in them."""
    figure, (axes,) = _figure(1)
    scored = [row for row in rows if row["score"] is not None]
    layer_sets = sorted({row[LAYERS] for row in scored})
    groups = [[row for row in scored if row[LAYERS] == name] for name in layer_sets]
    axes.boxplot([[row["score"] for row in group] for group in groups], tick_labels=layer_sets, showfliers=False)
    for place, group in enumerate(groups, start=1):
        for row in group:
            marker, alpha = _MARKERS[row["status"]]
            axes.scatter([place], [row["score"]], marker=marker, alpha=alpha, color=f"C{place - 1}", s=45)
    axes.set(xlabel="layers", ylabel="score at the last evaluation")
    axes.tick_params(axis="x", rotation=20)
    _add_title(axes, rows)
    figure.savefig(path, dpi=120)


def plot_pareto(rows: Rows, front: Sequence[int], path: Path) -> None:
    """GS against LS; the line joins the finished trials that none beats in both."""
    figure, (axes,) = _figure(1)
    measured = [row for row in rows if row["GS"] is not None and row["LS"] is not None]
    for row in measured:
        marker, alpha = _MARKERS[row["status"]]
        axes.scatter([row["LS"]], [row["GS"]], marker=marker, alpha=alpha, color="C0", s=45)
        axes.annotate(str(row["number"]), (row["LS"], row["GS"]), xytext=(4, 4), textcoords="offset points", fontsize=8)
    line = sorted((row["LS"], row["GS"]) for row in measured if row["number"] in front)
    if line:
        axes.plot(*zip(*line, strict=True), color="C3", label="Pareto front", zorder=0)
        axes.legend(loc="lower left")
    axes.set(xlabel="LS: right answers to unrelated prompts", ylabel="GS: right answers to rephrasings")
    _add_title(axes, rows)
    figure.savefig(path, dpi=120)


def plot_budget(rows: Rows, steps: int, path: Path) -> None:
    """How far each trial came, and what it cost."""
    figure, (left, right) = _figure(2)
    numbers = [row["number"] for row in rows]
    colours = {"finished": "C2", "stopped": "C1", "failed": "C3", "planned": "0.7"}
    for axes, key, label in ((left, "step", "steps"), (right, "seconds", "seconds")):
        axes.barh(numbers, [row[key] for row in rows], color=[colours[row["status"]] for row in rows])
        axes.set(xlabel=label, ylabel="trial", yticks=numbers)
        axes.invert_yaxis()
    left.axvline(steps, color="0.5", linestyle=":")
    statuses = dict.fromkeys(row["status"] for row in rows)
    right.legend(handles=[Patch(color=colours[status], label=status) for status in statuses], fontsize="small")
    spent = sum(row["step"] for row in rows)
    figure.suptitle(f"{spent} of {len(rows) * steps} steps, {sum(row['seconds'] for row in rows):.0f} s", fontsize=10)
    figure.savefig(path, dpi=120)


def plot_sweep(rows: Rows, sweep: SweepConfig, front: Sequence[int], steps: int, folder: Path) -> list[Path]:
    """Draw every picture that the sweep's parameters and trials allow; their paths."""
    pictures: list[Path] = []

    def picture(name: str) -> Path:
        pictures.append(folder / f"{name}.png")
        return pictures[-1]

    for name, values in sweep.parameters.items():
        if isinstance(values, Range) or all(isinstance(value, int | float) for value in values):
            plot_parameter(rows, name, values, picture(f"score-{name}"))
    if any(row["score"] is not None for row in rows) and sweep.layer_sets:
        plot_layer_sets(rows, picture("layer-sets"))
    plot_pareto(rows, front, picture("pareto"))
    plot_budget(rows, steps, picture("budget"))
    return pictures


def _figure(columns: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(6.4 if columns == 1 else 10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _add_title(axes: Axes, rows: Rows) -> None:
    axes.set_title(f"{len(rows)} trials; ● all steps, × stopped early", fontsize=9)

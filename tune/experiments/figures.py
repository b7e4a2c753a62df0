"""Pictures of experiments, drawn from their JSON alone; PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from malmen.methods.registry import METHODS, Method
from malmen.metrics import METRICS
from malmen.tune.experiments.memory import WAYS

_FACTS = {"edit": "edits", "equivalent": "rephrasings", "unrelated": "unrelated"}
PANELS = {metric.name: f"{metric.label}: {_FACTS[metric.kind]}" for metric in METRICS}
_LIKE = {"squares_answer": "malmen", "sum_answer": "mend"}  # variants of `cancellation`, drawn as these methods
_OTHER = Method("", "", "C5", "o")  # results of a method that this version does not have


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """The picture of an experiment, if it has one."""
    maker = _MAKERS.get(found["experiment"])
    if maker is None or not found["rows"]:
        return []
    figure = maker(found)
    made = [folder / f"{found['experiment']}.{kind}" for kind in ("png", "svg")]
    for path in made:
        figure.savefig(path, dpi=120)
    return made


def _figure(columns: int, width: float = 3.6, height: float = 3.4) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width * columns + 1, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _title(figure: Figure, found: dict[str, Any], text: str) -> None:
    seeds = ", ".join(map(str, found["seeds"]))
    what = "mean ± standard deviation over seeds" if len(found["seeds"]) > 1 else "seed"
    between = "\n" if len(figure.axes) == 1 else " · "  # one panel is narrow
    figure.suptitle(f"{text} · {found['model']}{between}{what} {seeds}", fontsize=9)


def _band(
    axes: Axes, rows: Sequence[dict[str, Any]], name: str, scale: float, label: str, colour: str, mark: str = "o"
) -> None:
    """A line over the number of edits, with the deviation as a band."""
    some = [row for row in rows if row.get(name) is not None]
    edits = [row["edits"] for row in some]
    means = [scale * row[name]["mean"] for row in some]
    wide = [scale * row[name]["deviation"] for row in some]
    axes.plot(edits, means, marker=mark, markersize=4, label=label, color=colour)
    low = [mean - one for mean, one in zip(means, wide, strict=True)]
    high = [mean + one for mean, one in zip(means, wide, strict=True)]
    axes.fill_between(edits, low, high, alpha=0.18, linewidth=0, color=colour)


def _over_edits(axes: Axes, edits: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(edits)), [str(number) for number in sorted(set(edits))])
    axes.minorticks_off()
    axes.set_xlabel("edits at once")
    axes.grid(alpha=0.3)


def _scaling(found: dict[str, Any]) -> Figure:
    figure, panels = _figure(len(PANELS))
    names = list(dict.fromkeys(row["variant"] for row in found["rows"]))
    for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
        for variant in names:
            rows = [row for row in found["rows"] if row["variant"] == variant]
            method = METHODS.get(variant, _OTHER)
            _band(axes, rows, name, 100, rows[0]["label"], method.colour, method.marker)
        befores = [row[f"{name}_before"]["mean"] for row in found["rows"] if row[f"{name}_before"]]
        if befores:
            axes.axhline(100 * sum(befores) / len(befores), color="grey", linestyle=":", label="unedited")
        _over_edits(axes, [row["edits"] for row in found["rows"]])
        axes.set_ylim(0, 103)
        axes.set_ylabel(f"{title}, right tokens (%)")
    panels[0].legend(fontsize=7)
    _title(figure, found, "Right answers over the number of edits")
    return figure


def _bars(found: dict[str, Any], labels: Sequence[str], title: str) -> Figure:
    labels = [
        f"{label} ({row['seeds']} of {len(found['seeds'])} seeds)" if row["seeds"] and row["errors"] else label
        for label, row in zip(labels, found["rows"], strict=True)
    ]
    figure, panels = _figure(len(PANELS), height=1.2 + 0.34 * len(labels))
    for axes, (name, text) in zip(panels, PANELS.items(), strict=True):
        for place, row in enumerate(found["rows"]):
            if row[name] is None:
                axes.text(1, place, "failed", va="center", fontsize=8, color="C3")
                continue
            axes.barh(
                place, 100 * row[name]["mean"], xerr=100 * row[name]["deviation"], color=f"C{place % 10}", alpha=0.8
            )
        axes.set_yticks(range(len(labels)), labels if axes is panels[0] else [""] * len(labels), fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 103)
        axes.set_xlabel(f"{text}, right tokens (%)")
        axes.grid(alpha=0.3, axis="x")
    _title(figure, found, title)
    return figure


def _ablation(found: dict[str, Any]) -> Figure:
    return _bars(found, [row["label"] for row in found["rows"]], f"Ablation, {found['rows'][0]['edits']} edits")


def _rounds(found: dict[str, Any]) -> Figure:
    labels = [
        f"{row['label']}, " + ("at once" if row["rounds"] == 1 else f"{row['rounds']} rounds, {row['way']}")
        for row in found["rows"]
    ]
    return _bars(found, labels, f"Sequential editing, {found['rows'][0]['edits']} edits in all")


def _cancellation(found: dict[str, Any]) -> Figure:
    figure, (axes,) = _figure(1, width=4.6)
    for variant in dict.fromkeys(row["variant"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["variant"] == variant]
        method = METHODS.get(_LIKE.get(variant, variant), _OTHER)
        _band(axes, rows, "mean_residual", 1, rows[0]["label"], method.colour)
    axes.set_yscale("log")
    _over_edits(axes, [row["edits"] for row in found["rows"]])
    axes.set_ylabel("mean residual MR (no unit)")
    axes.legend(fontsize=8)
    _title(figure, found, "Cancellation")
    return figure


def _memory(found: dict[str, Any]) -> Figure:
    figure, (axes,) = _figure(1, width=4.6)
    for place, (way, label) in enumerate(WAYS.items()):
        rows = [row for row in found["rows"] if row["way"] == way]
        _band(axes, rows, "peak_mb", 1, label, f"C{place}", "os"[place])
        for row in rows:
            if "ran_out" in row:
                axes.plot(row["edits"], 1024 * row["ran_out"], "x", color=f"C{place}")
                axes.annotate(f"more than {row['ran_out']:g} GB", (row["edits"], 1024 * row["ran_out"]), fontsize=7)
    _over_edits(axes, [row["edits"] for row in found["rows"]])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("peak memory of the process (MB)")
    axes.legend(fontsize=8)
    _title(figure, found, "One meta-training step, one process each")
    return figure


def _recipes(found: dict[str, Any]) -> Figure:
    """The largest number of edits, where they differ most; the others are in the table."""
    most = max(row["edits"] for row in found["rows"])
    rows = [row for row in found["rows"] if row["edits"] == most]
    return _bars({**found, "rows": rows}, [row["label"] for row in rows], f"Other settings, {most} edits")


_MAKERS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "scaling": _scaling,
    "ablation": _ablation,
    "rounds": _rounds,
    "cancellation": _cancellation,
    "memory": _memory,
    "recipes": _recipes,
}

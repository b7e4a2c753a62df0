"""Pictures of experiments, drawn from their results alone; PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from malmen.lm.own_text import Form
from malmen.methods.registry import METHODS, Method
from malmen.metrics import METRICS
from malmen.tune.experiments.memory import WAYS
from malmen.tune.report import new_figure

_FACTS = {"edit": "edits", "equivalent": "rephrasings", "unrelated": "unrelated"}
PANELS = {metric.name: f"{metric.label}: {_FACTS[metric.kind]}, right tokens (%)" for metric in METRICS}
_GS = "generalization_success"
_LIKE = {"squares_answer": "malmen", "sum_answer": "mend"}  # variants of `cancellation`, drawn as these methods
_OTHER = Method("", "", "C5", "o")  # results of a method that this version does not have
_BAR_TITLES = {
    "ablation": "Ablation, {} edits",
    "rounds": "Sequential editing, {} edits in all",
    "recipes": "Other settings, {} edits",
}


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the picture of an experiment, if it has one; the paths."""
    kind = result["experiment"]
    if kind not in _MAKERS or not result["rows"]:
        return []
    figure, title = _MAKERS[kind](result)
    seeds = ", ".join(map(str, result["seeds"]))
    what = "mean ± standard deviation over seeds" if len(result["seeds"]) > 1 else "seed"
    between = "\n" if len(figure.axes) == 1 else " · "  # one panel is narrow
    figure.suptitle(f"{title} · {result['model']}{between}{what} {seeds}", fontsize=9)
    paths = [folder / f"{kind}.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths


def _variant_bands(axes: Axes, rows: Sequence[dict[str, Any]], name: str, scale: float = 1) -> None:
    """A line for each variant."""
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        method = METHODS.get(_LIKE.get(variant, variant), _OTHER)
        _band(axes, own, name, own[0]["label"], method.colour, method.marker, scale)


def _band(
    axes: Axes, rows: Sequence[dict[str, Any]], name: str, label: str, colour: str, marker: str, scale: float = 1
) -> None:
    """A line over the number of edits, with the deviation as a band."""
    measured = [row for row in rows if row.get(name) is not None]
    edits = [row["edits"] for row in measured]
    means = scale * np.array([row[name]["mean"] for row in measured])
    deviations = scale * np.array([row[name]["deviation"] for row in measured])
    axes.plot(edits, means, marker=marker, markersize=4, label=label, color=colour)
    axes.fill_between(edits, means - deviations, means + deviations, alpha=0.18, linewidth=0, color=colour)


def _over_edits(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    edits = sorted({row["edits"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(edits, [str(number) for number in edits])
    axes.minorticks_off()
    axes.set_xlabel("edits at once")
    axes.grid(alpha=0.3)


def _scaling(result: dict[str, Any]) -> tuple[Figure, str]:
    figure, panels = new_figure(len(PANELS), 3.6 * len(PANELS) + 1, 3.4)
    rows = result["rows"]
    for axes, (name, label) in zip(panels, PANELS.items(), strict=True):
        _variant_bands(axes, rows, name, 100)
        if befores := [row[f"{name}_before"]["mean"] for row in rows if row[f"{name}_before"]]:
            axes.axhline(100 * sum(befores) / len(befores), color="grey", linestyle=":", label="unedited")
        _over_edits(axes, rows)
        axes.set(ylim=(0, 103), ylabel=label)
    panels[0].legend(fontsize=7)
    return figure, "Right answers over the number of edits"


def _bars(result: dict[str, Any]) -> tuple[Figure, str]:
    """The variants at the largest number of edits, where they differ most; the others are in the table."""
    most = max(row["edits"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["edits"] == most]
    labels = []
    for row in rows:
        label = row["label"]
        if "rounds" in row:
            label += ", at once" if row["rounds"] == 1 else f", {row['rounds']} rounds, {row['way']}"
        if row["seeds"] and row["errors"]:
            label += f" ({row['seeds']} of {len(result['seeds'])} seeds)"
        labels.append(label)
    figure, panels = new_figure(len(PANELS), 3.6 * len(PANELS) + 1, 1.2 + 0.34 * len(rows))
    for axes, (name, text) in zip(panels, PANELS.items(), strict=True):
        for place, row in enumerate(rows):
            if row[name] is None:
                axes.text(1, place, "failed", va="center", fontsize=8, color="C3")
                continue
            mean, deviation = 100 * row[name]["mean"], 100 * row[name]["deviation"]
            axes.barh(place, mean, xerr=deviation, color=f"C{place % 10}", alpha=0.8)
        axes.set_yticks(range(len(rows)), labels if axes is panels[0] else [""] * len(rows), fontsize=8)
        axes.invert_yaxis()
        axes.set(xlim=(0, 103), xlabel=text)
        axes.grid(alpha=0.3, axis="x")
    return figure, _BAR_TITLES[result["experiment"]].format(most)


def _tradeoff(result: dict[str, Any]) -> tuple[Figure, str]:
    """GS over KL per token, a panel for each form of prompts: better is higher and further to the left."""
    forms = [form for form in get_args(Form) if any(row[f"own_{form}_kl"] for row in result["rows"])]
    variants = list(dict.fromkeys(row["variant"] for row in result["rows"]))
    figure, panels = new_figure(max(1, len(forms)), 4.8 * max(1, len(forms)) + 1, 4.2)
    for axes, form in zip(panels, forms, strict=False):
        for place, variant in enumerate(variants):
            method = METHODS.get(variant, Method("", "", f"C{place % 10}", "osD^v<>pPX"[place % 10]))
            rows = [row for row in result["rows"] if row["variant"] == variant and row[f"own_{form}_kl"]]
            kl = [row[f"own_{form}_kl"]["mean"] for row in rows]
            carried = [100 * row["generalization_success"]["mean"] for row in rows]
            deviation = [100 * row["generalization_success"]["deviation"] for row in rows]
            label = rows[0]["label"] if rows else None
            axes.errorbar(
                kl, carried, deviation, marker=method.marker, markersize=4, color=method.colour, label=label, lw=1
            )
            for row, x, y in zip(rows, kl, carried, strict=True):
                axes.annotate(str(row["edits"]), (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        if floors := [row[f"own_{form}_kl_floor"]["mean"] for row in result["rows"] if row[f"own_{form}_kl_floor"]]:
            axes.axvline(sum(floors) / len(floors), color="grey", linestyle=":", label="rounding to bfloat16")
        axes.set(xscale="log", xlabel=f"KL per token of its own texts, {form} prompts (nats)", ylabel=PANELS[_GS])
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    return figure, "What carries over, and what else changes"


def _cancellation(result: dict[str, Any]) -> tuple[Figure, str]:
    figure, (axes,) = new_figure(1, 5.6, 3.4)
    _variant_bands(axes, result["rows"], "mean_residual")
    _over_edits(axes, result["rows"])
    axes.set(yscale="log", ylabel="mean residual MR (no unit)")
    axes.legend(fontsize=8)
    return figure, "Cancellation"


def _memory(result: dict[str, Any]) -> tuple[Figure, str]:
    figure, (axes,) = new_figure(1, 5.6, 3.4)
    for place, (way, label) in enumerate(WAYS.items()):
        rows = [row for row in result["rows"] if row["way"] == way]
        _band(axes, rows, "peak_mb", label, f"C{place}", "os"[place])
        for row in rows:
            if "ran_out" in row:
                axes.plot(row["edits"], 1024 * row["ran_out"], "x", color=f"C{place}")
                axes.annotate(f"more than {row['ran_out']:g} GB", (row["edits"], 1024 * row["ran_out"]), fontsize=7)
    _over_edits(axes, result["rows"])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("peak memory of the process (MB)")
    axes.legend(fontsize=8)
    return figure, "One meta-training step, one process each"


_MAKERS: dict[str, Callable[[dict[str, Any]], tuple[Figure, str]]] = {
    "scaling": _scaling,
    "cancellation": _cancellation,
    "memory": _memory,
    "tradeoff": _tradeoff,
    **dict.fromkeys(_BAR_TITLES, _bars),
}

"""The numbers of each experiment as one JSON file, from which its picture can be drawn again."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from malmen.config import Config
from malmen.methods.registry import METHODS
from malmen.runs.files import atomic_file
from malmen.tune.experiments.cells import MEMORY, Cell, Cells
from malmen.tune.experiments.figures import draw
from malmen.tune.experiments.memory import WAYS
from malmen.tune.experiments.settings import ExperimentConfig
from malmen.tune.experiments.variants import Variant, ablation, cancelling, method_variant, recipe, round_methods

NUMBERS = (
    "edit_success", "generalization_success", "locality_success", "locality_agreement",
    "edit_success_generated", "generalization_success_generated", "locality_success_generated",
    "edit_success_ended", "generalization_success_ended", "locality_success_ended",
    "locality_agreement_generated", "mean_residual",
)  # fmt: skip
BEFORE = ("edit_success_before", "generalization_success_before", "locality_success_before")


def write_results(settings: ExperimentConfig, config: Config, folder: Path, kinds: Iterable[str]) -> list[Path]:
    """One JSON file and pictures for each experiment whose pieces are done."""
    places = folder / "results"
    places.mkdir(exist_ok=True)
    written = []
    for kind in sorted(kinds):
        found = _MAKERS[kind](settings, config, Cells(folder))
        found = {"experiment": kind, "model": config.model.name, "seeds": settings.seeds, **found}
        path = places / f"{kind}.json"
        atomic_file(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        draw(found, places)
        written.append(path)
    return written


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of what was measured, and what failed."""
    good = [cell for cell in cells if "scores" in cell]
    row: dict[str, Any] = {"seeds": len(good), "errors": sorted({cell["error"] for cell in cells if "error" in cell})}
    for name in (*NUMBERS, *BEFORE):
        row[name] = spread([cell["scores"].get(name) for cell in good])
    for name in ("score", "edit_seconds", "training_seconds"):
        row[name] = spread([cell[name] for cell in good])
    return row


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, standard deviation and the values themselves."""
    found = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not found:
        return None
    deviation = statistics.stdev(found) if len(found) > 1 else 0.0
    return {"mean": statistics.fmean(found), "deviation": deviation, "values": found}  # type: ignore[dict-item]


def _row(store: Cells, variant: Variant, settings: ExperimentConfig, edits: int, **more: Any) -> dict[str, Any]:
    found = [store.get(Cell(variant.name, seed, edits, **more)) for seed in settings.seeds]
    some = [cell for cell in found if cell is not None]
    return {"variant": variant.name, "label": variant.label(), "edits": edits, **summary(some)}


def _scaling(settings: ExperimentConfig, config: Config, store: Cells) -> dict[str, Any]:
    variants = [method_variant(name, config) for name in settings.methods]
    return {"rows": [_row(store, variant, settings, edits) for variant in variants for edits in settings.edits]}


def _ablation(settings: ExperimentConfig, config: Config, store: Cells) -> dict[str, Any]:
    variants = [*(ablation(name, config) for name in settings.ablations), method_variant("malmen", config)]
    return {"rows": [_row(store, variant, settings, settings.ablation_edits) for variant in variants]}


def _cancellation(settings: ExperimentConfig, config: Config, store: Cells) -> dict[str, Any]:
    variants = cancelling(config)
    return {"rows": [_row(store, variant, settings, edits) for variant in variants for edits in settings.edits]}


def _recipes(settings: ExperimentConfig, config: Config, store: Cells) -> dict[str, Any]:
    variants = [method_variant("malmen", config), *(recipe(name, settings, config) for name in settings.recipes)]
    rows = [_row(store, variant, settings, edits) for edits in settings.edits for variant in variants]
    return {"rows": rows, "recipes": settings.recipes}


def _rounds(settings: ExperimentConfig, config: Config, store: Cells) -> dict[str, Any]:
    rows = []
    for name in round_methods(settings):
        variant = method_variant(name, config)
        rows.append({**_row(store, variant, settings, settings.ablation_edits), "rounds": 1, "way": "at once"})
        for way in METHODS[name].rounds:
            row = _row(store, variant, settings, settings.ablation_edits, rounds=settings.rounds, way=way)
            rows.append({**row, "rounds": settings.rounds, "way": way})
    return {"rows": rows}


def _memory(settings: ExperimentConfig, config: Config, store: Cells) -> dict[str, Any]:
    path = store.folder / "cells" / MEMORY
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = []
    for way in WAYS:
        for edits in sorted(settings.memory_edits):
            some = [row for row in found if (row["way"], row["edits"]) == (way, edits)]
            some = [row for row in some if row["seed"] in settings.seeds]
            if some:
                rows.append({"way": way, "edits": edits, **memory_summary(some)})
    return {"rows": rows, "limit_gb": settings.memory_gb}


def memory_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over seeds, in MB; if one ran out or failed, that is what is told of all."""
    for why in ("ran_out", "error"):
        if lost := [row[why] for row in rows if why in row]:
            return {why: lost[0]}
    return {
        "peak_mb": spread([row["peak_mb"] for row in rows]),
        "added_mb": spread([row["peak_mb"] - row["before_mb"] for row in rows]),  # by the step
    }


def _failures(settings: ExperimentConfig, config: Config, store: Cells) -> dict[str, Any]:
    """Of the first seed, at the largest number of edits."""
    rows = []
    for name in settings.methods:
        found = store.get(Cell(name, settings.seeds[0], max(settings.edits)))
        label = method_variant(name, config).label()
        rows += [{"variant": name, "label": label, **row} for row in (found or {}).get("failures", [])]
    return {"edits": max(settings.edits), "rows": rows}


_MAKERS = {
    "scaling": _scaling,
    "ablation": _ablation,
    "cancellation": _cancellation,
    "rounds": _rounds,
    "memory": _memory,
    "failures": _failures,
    "recipes": _recipes,
}

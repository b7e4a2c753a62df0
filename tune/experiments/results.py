"""The results of each experiment as one JSON file, from which its picture can be drawn again."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from malmen.config import Config
from malmen.lm.own_text import Form
from malmen.measure.drift import Drift
from malmen.methods.registry import METHODS
from malmen.metrics import BEFORE, BY_TOKENS, ENDED, FLOOR, GENERATED, METRICS
from malmen.runs.files import write_json
from malmen.tune.experiments.cells import Cell, Cells
from malmen.tune.experiments.figures import draw
from malmen.tune.experiments.memory import WAYS
from malmen.tune.experiments.settings import ExperimentConfig
from malmen.tune.experiments.variants import rows_of

NUMBERS = (
    *(metric.name + counted for counted in (BY_TOKENS, GENERATED, ENDED, BEFORE) for metric in METRICS),
    "locality_agreement",
    "locality_agreement_generated",
    "mean_residual",
    *(f"own_{form}_{field.name}{of}" for of in ("", FLOOR) for form in get_args(Form) for field in fields(Drift)),
)


def write_results(settings: ExperimentConfig, config: Config, folder: Path, kinds: Iterable[str]) -> list[Path]:
    """Results and pictures of these experiments, from the cells that are measured; the paths of the JSON files."""
    (folder / "results").mkdir(exist_ok=True)
    written = []
    for kind in sorted(kinds):
        result = {"experiment": kind, "model": config.model.name, "seeds": settings.seeds}
        result |= _result(kind, settings, config, Cells(folder))
        path = folder / "results" / f"{kind}.json"
        write_json(path, result)
        draw(result, path.parent)
        written.append(path)
    return written


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of each number, and the errors of the seeds that failed."""
    good = [cell for cell in cells if "scores" in cell]
    return {
        "seeds": len(good),
        "errors": sorted({cell["error"] for cell in cells if "error" in cell}),
        **{name: spread([cell["scores"].get(name) for cell in good]) for name in NUMBERS},
        **{name: spread([cell[name] for cell in good]) for name in ("score", "edit_seconds", "training_seconds")},
    }


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Mean, standard deviation and the finite values themselves; None without any."""
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    deviation = statistics.stdev(finite) if len(finite) > 1 else 0.0
    return {"mean": statistics.fmean(finite), "deviation": deviation, "values": finite}


def _result(kind: str, settings: ExperimentConfig, config: Config, store: Cells) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    if kind == "memory":
        measured = [row for row in store.memory() if row.get("seed") in settings.seeds]
        for way, edits in itertools.product(WAYS, sorted(settings.memory_edits)):
            if same := [row for row in measured if (row["way"], row["edits"]) == (way, edits)]:
                rows.append({"way": way, "edits": edits, **memory_summary(same)})
        return {"rows": rows, "limit_gb": settings.memory_gb}
    if kind == "failures":  # of the first seed, at the largest number of edits
        most = max(settings.edits)
        for name in settings.methods:
            failures = store.get(Cell(name, settings.seeds[0], most)).get("failures", [])
            rows += [{"variant": name, "label": METHODS[name].label, **failure} for failure in failures]
        return {"edits": most, "rows": rows}
    for row in rows_of(kind, settings, config):
        about = {"variant": row.variant.name, "label": row.variant.label, "edits": row.edits}
        in_rounds = {"rounds": row.rounds, "way": row.way} if kind == "rounds" else {}
        rows.append({**about, **summary([store.get(Cell.of(row, seed)) for seed in settings.seeds]), **in_rounds})
    return {"rows": rows, **({"recipes": settings.recipes} if kind in ("recipes", "tradeoff") else {})}


def memory_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over seeds, in MB; if one seed ran out or failed, only that."""
    for why in ("ran_out", "error"):
        if reasons := [row[why] for row in rows if why in row]:
            return {why: reasons[0]}
    return {
        "peak_mb": spread([row["peak_mb"] for row in rows]),
        "added_mb": spread([row["peak_mb"] - row["before_mb"] for row in rows]),  # by the step
    }

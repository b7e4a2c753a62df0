"""All experiments on one HTML page that needs no other file; `templates/report.html` is the page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined

from malmen.lm.own_text import Form
from malmen.metrics import ENDED, FLOOR, GENERATED, METRICS
from malmen.runs.files import atomic_file
from malmen.tune.experiments.cells import ABOUT, Cells
from malmen.tune.experiments.findings import findings
from malmen.tune.experiments.settings import KINDS

REPORT = "report.html"
_LABELS = {metric.name: metric.label for metric in METRICS}
_DRIFT = {"kl": "KL", "sure_agreement": "agreement where sure", "unchanged_20": "unchanged"}
# Headings of the columns by the names of the numbers in results.
SCORE_COLUMNS = {
    **_LABELS,
    "locality_agreement": "agreement",
    "score": "harmonic mean",
    **{name + GENERATED: f"{label} gen." for name, label in _LABELS.items()},
    "locality_agreement_generated": "agreement gen.",
    **{name + ENDED: f"{label} ended" for name, label in _LABELS.items()},
    "mean_residual": "MR",
    "training_seconds": "train (s)",
    "edit_seconds": "edit (s)",
}
# GS beside what else changes, and the floor of that: rounding the unedited model to bfloat16.
TRADEOFF_COLUMNS = {
    **_LABELS,
    **{f"own_{form}_{name}": f"{text}, {form}" for form in get_args(Form) for name, text in _DRIFT.items()},
    **{
        f"own_{form}_{name}{FLOOR}": f"{text}, {form}, floor"
        for form in get_args(Form)
        for name, text in _DRIFT.items()
    },
    "training_seconds": "train (s)",
    "edit_seconds": "edit (s)",
}
RESIDUAL_COLUMNS = {"mean_residual": "MR", **_LABELS, "locality_agreement": "agreement"}


def write_report(folder: Path) -> Path:
    """The page of a folder of experiments, from its JSON files alone; returns its path."""
    files = {kind: path for kind in KINDS if (path := folder / "results" / f"{kind}.json").exists()}
    page = render(
        {kind: json.loads(path.read_text(encoding="utf-8")) for kind, path in files.items()},
        json.loads((folder / ABOUT).read_text(encoding="utf-8")),
        {kind: picture.read_bytes() for kind, path in files.items() if (picture := path.with_suffix(".svg")).exists()},
        sorted(Cells(folder).codes()),
    )
    atomic_file(folder / REPORT, page)
    return folder / REPORT


def render(
    results: Mapping[str, Any], about: Mapping[str, Any], pictures: Mapping[str, bytes], codes: Sequence[str]
) -> str:
    """The page as HTML; `about` is experiment.json, `pictures` are SVG files by experiment."""
    loader = PackageLoader("malmen.tune.experiments")
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    settings = {"experiment": about["experiment"], "config": about["config"]}
    return templates.get_template(REPORT).render(
        title=f"Editing {about['config']['model']['name']}: MALMEN and its rivals",
        **settings,
        settings=json.dumps(settings, indent=1, ensure_ascii=False),
        results=results,
        findings=findings(results),
        pictures={kind: base64.b64encode(picture).decode() for kind, picture in pictures.items()},
        codes=codes,
        score_columns=SCORE_COLUMNS,
        columns={"cancellation": RESIDUAL_COLUMNS, "tradeoff": TRADEOFF_COLUMNS},
        measured_columns=_measured_columns,
        number=_number,
    )


def _measured_columns(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns that at least one row has a number for."""
    return {name: text for name, text in columns.items() if any(row.get(name) for row in rows)}


def _number(name: str, value: Mapping[str, float] | None) -> str:
    if value is None:
        return "–"
    mean, deviation = value["mean"], value["deviation"]
    if name.endswith("_seconds"):
        return f"{mean:.1f}"
    if name == "mean_residual" or "_kl" in name:
        return f"{mean:.3g}"
    return f"{mean:.0f} ± {deviation:.0f}" if name.endswith("_mb") else f"{100 * mean:.1f} ± {100 * deviation:.1f}"

"""All experiments on one HTML page that needs no other file; `templates/report.html` is the page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from malmen.metrics import ENDED, GENERATED, METRICS
from malmen.runs.files import atomic_file
from malmen.tune.experiments.cells import Cells
from malmen.tune.experiments.findings import findings
from malmen.tune.experiments.settings import KINDS

REPORT = "report.html"
_LABELS = {metric.name: metric.label for metric in METRICS}
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
RESIDUAL_COLUMNS = {"mean_residual": "MR", **_LABELS, "locality_agreement": "agreement"}


def write_report(folder: Path) -> Path:
    """The page of a folder of experiments, from its JSON files alone; returns its path."""
    files = {kind: folder / "results" / f"{kind}.json" for kind in KINDS}
    results = {kind: json.loads(path.read_text(encoding="utf-8")) for kind, path in files.items() if path.exists()}
    pictures = {kind: path.with_suffix(".svg") for kind, path in files.items()}
    about = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    page = render(
        results,
        about,
        {kind: path.read_bytes() for kind, path in pictures.items() if kind in results and path.exists()},
        sorted(Cells(folder).codes()),
    )
    atomic_file(folder / REPORT, page)
    return folder / REPORT


def render(
    results: Mapping[str, Any], about: Mapping[str, Any], pictures: Mapping[str, bytes], codes: Sequence[str]
) -> str:
    """The page as HTML; `about` is experiment.json, `pictures` are SVG files by experiment."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    settings = {"experiment": about["experiment"], "config": about["config"]}
    return environment.get_template("report.html").render(
        title=f"Editing {about['config']['model']['name']}: MALMEN and its rivals",
        **settings,
        settings=json.dumps(settings, indent=1, ensure_ascii=False),
        results=results,
        findings=findings(results),
        pictures={kind: base64.b64encode(picture).decode() for kind, picture in pictures.items()},
        codes=codes,
        score_columns=SCORE_COLUMNS,
        residual_columns=RESIDUAL_COLUMNS,
        measured_columns=_measured_columns,
        number=_number,
        megabytes=_megabytes,
    )


def _measured_columns(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns that at least one row has a number for."""
    return {name: text for name, text in columns.items() if any(row.get(name) for row in rows)}


def _number(name: str, value: Mapping[str, float] | None) -> str:
    if value is None:
        return "–"
    if name.endswith("_seconds"):
        return f"{value['mean']:.1f}"
    if name == "mean_residual":
        return f"{value['mean']:.3g}"
    return f"{100 * value['mean']:.1f} ± {100 * value['deviation']:.1f}"


def _megabytes(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.0f} ± {value['deviation']:.0f}"

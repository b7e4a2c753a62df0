"""The report of a sweep: one HTML file that needs nothing else, its pictures, and its numbers as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from malmen.runs.files import atomic_file, atomic_folder
from malmen.tune.plots import plot_sweep
from malmen.tune.results import SHARES, sweep_results
from malmen.tune.sweep_folder import SweepFolder

REPORT = "report.html"


def write_report(folder: SweepFolder) -> Path:
    """Build the report from the records in the folder, in place of an earlier one; the path of the HTML file."""
    config, sweep, _ = folder.load()
    results = sweep_results(folder)
    target = folder.path / "report"
    with atomic_folder(target, replaces=REPORT) as fresh:
        rows, front = results["trials"], results["pareto_front"]
        pictures = plot_sweep(rows, sweep, front, config.training.steps, fresh)
        atomic_file(fresh / "results.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        atomic_file(fresh / REPORT, _page(results, pictures))
    return target / REPORT


def _page(results: dict[str, Any], pictures: Sequence[Path]) -> str:
    rows = results["trials"]
    statuses = [row["status"] for row in rows]
    columns = [name for name in (rows[0] if rows else {}) if name not in ("tracking_run", "why")]
    templates = Environment(loader=PackageLoader("malmen.tune"), autoescape=True, keep_trailing_newline=True)
    templates.filters["cell"] = _cell
    return templates.get_template(REPORT).render(
        results=results,
        champion=results["champion"],
        counts={name: statuses.count(name) for name in ("finished", "stopped", "failed") if name in statuses},
        pictures={path.stem: base64.b64encode(path.read_bytes()).decode() for path in pictures},
        columns=[*columns, "why"],
    )


def _cell(value: Any, column: str = "") -> str:
    if value is None:
        return "–"
    if column in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

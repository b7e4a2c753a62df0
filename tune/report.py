"""The report of a sweep: its results as plain values, its pictures, and one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from malmen.metrics import METRICS
from malmen.platform.tracking.store import redact_credentials
from malmen.runs.files import atomic_file, atomic_folder
from malmen.tune.plots import plot_sweep
from malmen.tune.sweep_folder import SweepFolder, TrialRecord

REPORT = "report.html"
SHARES = {metric.label: metric.name for metric in METRICS}


def write_report(folder: SweepFolder) -> Path:
    """Build the report from the records in the folder, in place of an earlier one; the path of the HTML file."""
    results = sweep_results(folder)
    target = folder.path / "report"
    with atomic_folder(target, replaces=REPORT) as fresh:
        pictures = plot_sweep(results, folder.load()[1], fresh)
        atomic_file(fresh / "results.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        atomic_file(fresh / REPORT, _page(results, pictures))
    return target / REPORT


def sweep_results(folder: SweepFolder) -> dict[str, Any]:
    """The sweep, its best trial and all its trials, as in `results.json`."""
    config, sweep, facts = folder.load()
    rows = [trial_row(trial) for trial in folder.trials()]
    return {
        "model": config.model.name,
        "steps": config.training.steps,
        "search": sweep.search,
        "early_stopping": sweep.early_stopping,
        "score": sweep.score,
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


def pareto_front(rows: Sequence[dict[str, Any]]) -> list[int]:
    """The finished trials that no other one beats in GS or LS without being worse in the other: numbers, by GS."""
    points = {row["number"]: (row["GS"], row["LS"]) for row in rows if row["status"] == "finished"}
    points = {number: point for number, point in points.items() if None not in point}

    def is_beaten(gs: float, ls: float) -> bool:
        return any(rival != (gs, ls) and rival[0] >= gs and rival[1] >= ls for rival in points.values())

    return sorted((number for number, point in points.items() if not is_beaten(*point)), key=points.__getitem__)


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

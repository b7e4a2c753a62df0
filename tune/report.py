"""The report of a sweep: one HTML file that needs nothing else, its pictures, and its numbers as JSON."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from malmen.runs.files import atomic_file, atomic_folder
from malmen.tune.plots import plot_sweep
from malmen.tune.results import SHARES, sweep_results
from malmen.tune.sweep_folder import SweepFolder

REPORT = "report.html"

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }
th:nth-child(-n+3), td:nth-child(-n+3), td:last-child { text-align: left; }
tr.best { font-weight: 600; background: #7c62; }
figure { display: inline-block; margin: .5rem; max-width: 100%; }
img { max-width: 100%; background: white; }
"""


def write_report(folder: SweepFolder) -> Path:
    """Build it anew from the records in the folder; the path of the HTML file."""
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
    title = f"Sweep of editors for {results['model']}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(_summary(results))}</p>
{_champion(results["champion"])}
<h2>Pictures</h2>
{"".join(_figure(path) for path in pictures)}
<h2>Trials</h2>
{_table(results)}
<p>The score is the harmonic mean of {html.escape(", ".join(results["score"]))}. ES, GS and LS are shares of right
answer tokens on held-out records at the trial's last evaluation, after so many steps.</p>
</body></html>
"""


def _summary(results: dict[str, Any]) -> str:
    rows = results["trials"]
    counts = {status: sum(row["status"] == status for row in rows) for status in ("finished", "stopped", "failed")}
    shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    spent = sum(row["step"] for row in rows)
    return (
        f"{len(rows)} trials of at most {results['steps']} steps ({shown}); {results['search']} search, early "
        f"stopping: {results['early_stopping']}, seed {results['seed']}. {spent} steps were spent of "
        f"{len(rows) * results['steps']} without early stopping."
    )


def _champion(champion: dict[str, Any] | None) -> str:
    if champion is None:
        return "<p>No trial has been chosen yet.</p>"
    params = ", ".join(f"{name} = {_cell(value)}" for name, value in champion["params"].items())
    where = f"models of MLflow: <code>{html.escape(champion['uri'])}</code>, " if champion["uri"] else ""
    return (
        f"<p><b>The best:</b> trial {champion['number']} ({html.escape(params)}), score {champion['score']:.3f} after "
        f"{champion['steps']} steps. {where}use it: "
        f"<code>malmen edit --editor {html.escape(champion['editor'])} --facts FILE</code></p>"
    )


def _figure(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    name = html.escape(path.stem)
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>\n'


def _table(results: dict[str, Any]) -> str:
    rows = results["trials"]
    best = (results["champion"] or {}).get("number")
    names = [name for name in (rows[0] if rows else {}) if name not in ("tracking_run", "why")] + ["why"]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr{' class=best' if row['number'] == best else ''}>"
        + "".join(f"<td>{html.escape(_cell(row.get(name), name))}</td>" for name in names)
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _cell(value: Any, name: str = "") -> str:
    if value is None:
        return "–"
    if name in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

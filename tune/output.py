"""What `malmen sweep` and `malmen experiment` print: their progress, and the table of trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.table import Table
from rich.text import Text

from malmen.platform.cli.output import err, out, percent, print_json
from malmen.platform.cli.progress import counted
from malmen.tune.follow import ProgressListener, short_text
from malmen.tune.report import SHARES


@contextmanager
def progress(of: str) -> Iterator[ProgressListener]:
    """On standard error: the pieces that are done, and a line for each remark."""
    with counted(of, announced=False) as on_progress:
        yield ProgressListener(on_progress, lambda text: err.print(text, soft_wrap=True))


def show_sweep(results: dict[str, Any], as_json: bool) -> None:
    """The results of a sweep (`sweep_results`, and where its report is)."""
    if as_json:
        print_json(results)
        return
    out.print(_table(results))
    lines = []
    if champion := results["champion"]:
        version = f", registered as {champion['uri']} (version {champion['version']})" if champion["uri"] else ""
        score = f"score {champion['score']:.3f} after {champion['steps']} steps"
        lines.append(f"Best: trial {champion['number']}, {score}{version}")
    lines.append(f"Report: {results['report']}")
    if results["tracking_uri"]:
        lines.append(f"Compare the trials: mlflow ui --backend-store-uri {results['tracking_uri']}")
    out.print("\n".join(lines), soft_wrap=True)
    if champion:
        err.print(f"Next: malmen edit --editor {champion['editor']} --facts FILE", soft_wrap=True)


def _table(results: dict[str, Any]) -> Table:
    rows = results["trials"]
    best = (results["champion"] or {}).get("number")
    fixed = {"number", "status", "step", "seconds", "score", "why", "tracking_run", *SHARES}
    params = [name for name in (rows[0] if rows else {}) if name not in fixed]
    table = Table(title=f"Trials by score; * on the Pareto front of GS and LS ({results['model']})")
    for heading in ("trial", *(name.rpartition(".")[2] for name in params), "", "steps", *SHARES, "score"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for row in sorted(rows, key=lambda row: (row["status"] != "finished", -(row["score"] or 0.0))):
        cells = [
            f"{row['number']}{'*' if row['number'] in results['pareto_front'] else ''}",
            *(short_text(row[name]) for name in params),
            row["status"],
            str(row["step"]),
            *(percent(row[short]) for short in SHARES),
            "–" if row["score"] is None else f"{row['score']:.3f}",
        ]
        table.add_row(*map(Text, cells), style="bold" if row["number"] == best else None)
    return table

"""What `malmen sweep` prints: progress, and the table of trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from malmen.platform.cli.output import err, out, percent, print_json
from malmen.platform.cli.progress import bar
from malmen.tune.follow import SweepListener
from malmen.tune.results import SHARES
from malmen.tune.sweep_folder import TrialRecord


class SweepProgress:
    """A bar of trials, and a line for each event of a trial."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("trials", total=None)

    def begun(self, trials: int, concurrent: int) -> None:
        self.progress.update(self.task, total=trials)
        self.event(f"{trials} trials, {concurrent} at a time")

    def started(self, trial: TrialRecord) -> None:
        if not trial.judgements:
            self.event(f"trial {trial.number} starts: {describe(trial)}")

    def judged(self, trial: TrialRecord) -> None:
        if trial.last and not trial.ended:
            self.event(f"trial {trial.number} step {trial.last.step}: score {trial.last.score:.3f}")

    def ended(self, trial: TrialRecord) -> None:
        score = f"score {trial.last.score:.3f} at step {trial.last.step}" if trial.last else "no score"
        why = f", {trial.why}" if trial.why else ""
        self.event(f"trial {trial.number} {trial.status}: {score}{why}")
        self.progress.advance(self.task)

    def event(self, text: str) -> None:
        err.print(text, highlight=False, soft_wrap=True)


def describe(trial: TrialRecord) -> str:
    """A trial's parameters in a line."""
    return ", ".join(f"{name} {_short(value)}" for name, value in trial.params.items())


@contextmanager
def sweep_progress() -> Iterator[SweepListener]:
    """Progress of a sweep on standard error."""
    with bar() as progress:
        trials = SweepProgress(progress)
        yield SweepListener(trials.begun, trials.started, trials.judged, trials.ended, trials.event)


def show_sweep(results: dict[str, Any], as_json: bool) -> None:
    """The results of a sweep (`sweep_results`, and where its report is)."""
    if as_json:
        print_json(results)
        return
    out.print(_table(results))
    lines = [f"Report: {results['report']}"]
    if champion := results["champion"]:
        version = f", registered as {champion['uri']} (version {champion['version']})" if champion["uri"] else ""
        score = f"score {champion['score']:.3f} after {champion['steps']} steps"
        lines.insert(0, f"Best: trial {champion['number']}, {score}{version}")
    if results["tracking_uri"]:
        lines.append(f"Compare the trials: mlflow ui --backend-store-uri {results['tracking_uri']}")
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)
    if champion:
        err.print(f"Next: malmen edit --editor {champion['editor']} --facts FILE", highlight=False, soft_wrap=True)


def _table(results: dict[str, Any]) -> Table:
    rows = results["trials"]
    best = (results["champion"] or {}).get("number")
    fixed = {"number", "status", "step", "seconds", "score", "why", "tracking_run", *SHARES}
    params = [name for name in (rows[0] if rows else {}) if name not in fixed]
    table = Table(title=f"Trials by score; * on the Pareto front of GS and LS ({results['model']})")
    for heading in ("trial", *(name.rpartition(".")[2] for name in params), "", "steps", *SHARES, "score"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for row in sorted(rows, key=lambda row: (row["status"] != "finished", -(row["score"] or 0.0))):
        mark = "*" if row["number"] in results["pareto_front"] else ""
        cells = [
            f"{row['number']}{mark}",
            *(_short(row[name]) for name in params),
            row["status"],
            str(row["step"]),
            *(percent(row[short]) for short in SHARES),
            "–" if row["score"] is None else f"{row['score']:.3f}",
        ]
        table.add_row(*map(Text, cells), style="bold" if row["number"] == best else None)
    return table


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

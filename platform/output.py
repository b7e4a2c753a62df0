"""What the command line prints: tables for people, JSON for programs, progress on standard error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from malmen.evaluate import Evaluation, FactReport
from malmen.meta import StepReport

# No markup: what is printed holds prompts, answers and paths of users.
out = Console(markup=False)
err = Console(stderr=True, markup=False)

_ROLES = {"edit": "the edits (ES)", "equivalent": "rephrasings (GS)", "unrelated": "unrelated (LS)"}


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def percent(value: float | None) -> str:
    """A share for a table."""
    return "–" if value is None else f"{100 * value:.1f}"


def scores_table(evaluation: Evaluation) -> Table:
    """Before | after, for each role and way of measuring."""
    table = Table(title=f"{evaluation.edits} edits at once: right answers in %, before → after")
    table.add_column("asked")
    for heading in ("tokens", "whole answers", "generated freely"):
        table.add_column(heading, justify="right")
    for role, label in _ROLES.items():
        before, after = evaluation.before[role], evaluation.after[role]
        cells = zip(vars(before).values(), vars(after).values(), strict=True)
        table.add_row(label, *(f"{percent(old)} → {percent(new)}" for old, new in cells))
    return table


def spread_table(rows: list[dict[str, Any]]) -> Table:
    """Several evaluations: mean, least and largest of every score."""
    table = Table(title=f"{len(rows)} sets of {rows[0]['edits']} edits")
    for heading in ("score", "mean", "least", "largest"):
        table.add_column(heading, justify="left" if heading == "score" else "right")
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        if values and name != "edits":
            table.add_row(name, *(f"{value:.3f}" for value in (sum(values) / len(values), min(values), max(values))))
    return table


def scores_footer(evaluation: Evaluation) -> str:
    """The numbers that have no before."""
    parts = [f"largest ‖S‖/‖W‖ {max(evaluation.shift_ratio.values()):.3f}"]
    if evaluation.locality_agreement is not None:
        parts.insert(
            0, f"unrelated tokens predicted as by the unedited model {percent(evaluation.locality_agreement)} %"
        )
    if evaluation.mean_residual is not None:
        parts.append(f"mean residual {evaluation.mean_residual:.3f}")
    return " · ".join(parts)


def facts_table(facts: list[FactReport], title: str) -> Table:
    """Facts with what the model said before and says now."""
    table = Table(title=title)
    for heading in ("kind", "prompt", "wanted", "before", "after", ""):
        table.add_column(heading, overflow="fold")
    for fact in facts:
        verdict = Text("✓", "green") if fact.right_after else Text("✗", "red")
        before = fact.before if fact.before is not None else ("right" if fact.right_before else "wrong")
        after = fact.after if fact.after is not None else ("right" if fact.right_after else "wrong")
        # Text, not str: prompts and answers may look like markup.
        table.add_row(*map(Text, (fact.role, fact.prompt, fact.answer, before, after)), verdict)
    return table


class TrainingProgress:
    """A bar with losses and rate; plain lines where nobody watches."""

    def __init__(self, progress: Progress, steps: int, done: int) -> None:
        self.progress, self.steps = progress, steps
        self.task = progress.add_task("meta-training", total=steps, completed=done, losses="")

    def step(self, step: int, report: StepReport) -> None:
        """After each step."""
        losses = f"L_gen {report.generalization_loss:.3f} L_loc {report.locality_loss:.4f} |∇| {report.grad_norm:.2g}"
        rate = f"{sum(report.seconds.values()):.2f} s/step"
        self.progress.update(self.task, completed=step, losses=f"{losses} {rate}")
        if not err.is_terminal and (step % max(1, self.steps // 10) == 0 or step == self.steps):
            err.print(f"step {step}/{self.steps}  {losses}  {rate}", highlight=False)

    def evaluation(self, step: int, scores: dict[str, Any]) -> None:
        """After each evaluation on held-out records."""
        shares = " ".join(
            f"{short} {percent(scores[name])}"
            for short, name in (
                ("ES", "edit_success"),
                ("GS", "generalization_success"),
                ("LS", "locality_success"),
                ("agreement", "locality_agreement"),
            )
        )
        err.print(f"step {step}: held-out {shares}", highlight=False)


@contextmanager
def training_progress(steps: int, done: int = 0) -> Iterator[TrainingProgress]:
    """Progress of a training run on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
        yield TrainingProgress(progress, steps, done)

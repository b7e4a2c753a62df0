"""What the command line prints: tables for people, JSON for programs, progress on standard error."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from malmen.evaluate import FactReport
from malmen.meta import StepReport

# No markup: what is printed holds prompts, answers and paths of users.
out = Console(markup=False)
err = Console(stderr=True, markup=False)

_ROLES = {
    "edit_success": "the edits (ES)",
    "generalization_success": "rephrasings (GS)",
    "locality_success": "unrelated (LS)",
}
_WAYS = (("", "tokens"), ("_exact", "whole answers"), ("_ended", "generated, ends there"))


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def show_settings(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """What can be set, its default, what it means."""
    if as_json:
        print_json(list(rows))
        return
    table = Table("setting", "default", "meaning")
    for row in rows:
        default = "" if row["default"] is None else str(row["default"])
        table.add_row(*(Text(text) for text in (row["key"], default, row["description"])))
    out.print(table)


def percent(value: float | None) -> str:
    """A share for a table."""
    return "–" if value is None else f"{100 * value:.1f}"


def scores_table(scores: Mapping[str, Any]) -> Table:
    """Before | after, for each role and way of measuring (Evaluation.scores)."""
    table = Table(title=f"{scores['edits']} edits at once: right answers in %, before → after")
    table.add_column("asked")
    ways = [
        (suffix, heading) for suffix, heading in _WAYS if any(scores.get(name + suffix) is not None for name in _ROLES)
    ]
    for _, heading in ways:
        table.add_column(heading, justify="right")
    for name, label in _ROLES.items():
        cells = [(scores.get(f"{name}{suffix}_before"), scores.get(f"{name}{suffix}")) for suffix, _ in ways]
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


def scores_footer(scores: Mapping[str, Any]) -> str:
    """The numbers that have no before."""
    parts = [f"largest ‖S‖/‖W‖ {scores['max_shift_ratio']:.3f}"]
    if scores["locality_agreement"] is not None:
        agreement = percent(scores["locality_agreement"])
        parts.insert(0, f"unrelated tokens predicted as by the unedited model {agreement} %")
    if scores["locality_agreement_generated"] is not None:
        agreement = percent(scores["locality_agreement_generated"])
        parts.insert(1, f"unrelated texts generated as by it {agreement} %")
    if scores["mean_residual"] is not None:
        parts.append(f"mean residual {scores['mean_residual']:.3f}")
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

    def __init__(self, progress: Progress, steps: int) -> None:
        self.progress, self.steps = progress, steps
        self.task = progress.add_task("meta-training", total=steps, losses="starting")
        self.last: tuple[float, int] | None = None  # when the last line was printed, and at which step

    def step(self, step: int, report: StepReport) -> None:
        """After each step."""
        losses = f"L_gen {report.generalization_loss:.3f} L_loc {report.locality_loss:.4f} |∇| {report.grad_norm:.2g}"
        stages = " ".join(f"{stage} {seconds:.2g}" for stage, seconds in report.seconds.items())
        now = time.monotonic()
        if self.last is None:
            self.last = (now, step)
            self.progress.reset(self.task, total=self.steps, completed=step)  # the bar's rate counts from here
        self.progress.update(self.task, completed=step, losses=f"{losses}\nseconds: {stages}")
        if not err.is_terminal and (step % max(1, self.steps // 10) == 0 or step == self.steps):
            since, first = self.last
            rate = (now - since) / max(1, step - first)
            left = f"{rate * (self.steps - step):.0f} s left" if step > first else ""
            line = f"step {step}/{self.steps}  {losses}  {rate:.2f} s/step ({stages})  {left}"
            err.print(line, highlight=False, soft_wrap=True)
            self.last = (now, step)

    def event(self, text: str) -> None:
        """Something to know of: a resumption, a loss."""
        err.print(text, highlight=False)

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


def show_training(
    scores: Mapping[str, Any], facts: Mapping[str, Any], history: Sequence[Mapping[str, Any]], as_json: bool
) -> None:
    """The end of a training run."""
    stages = mean_seconds(history)
    if as_json:
        print_json({**scores, **facts, "seconds_per_step": stages})
        return
    out.print(scores_table(scores))
    out.print(scores_footer(scores), highlight=False)
    if stages:
        shown = " · ".join(f"{stage} {seconds:.3g}" for stage, seconds in stages.items())
        out.print(f"mean seconds of a step: {shown}", highlight=False, soft_wrap=True)
    where = f"The editor is in {facts['editor']} ({facts['seconds']:.0f} s)"
    registered = f", registered as {facts['registered']}" if facts.get("registered") else ""
    if facts.get("best"):
        err.print(f"An earlier checkpoint has better held-out scores: --editor {facts['editor']}@best", soft_wrap=True)
    err.print(f"{where}{registered}. Next: malmen edit --editor {facts['editor']} --facts FILE", soft_wrap=True)


def mean_seconds(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By stage, without the first step, which warms up."""
    steps = [row["seconds"] for row in history if "seconds" in row]
    steps = steps[1:] or steps
    names = dict.fromkeys(stage for row in steps for stage in row)
    return {stage: round(sum(row.get(stage, 0.0) for row in steps) / len(steps), 4) for stage in names}


@contextmanager
def training_progress(steps: int) -> Iterator[TrainingProgress]:
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
        yield TrainingProgress(progress, steps)

"""Progress on standard error: a bar with the time left on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from malmen.metrics import METRICS
from malmen.platform.cli.output import err, percent

if TYPE_CHECKING:
    from malmen.meta import StepReport

LINE_SECONDS = 3.0  # between two plain lines, at least
STEP_LINE_SECONDS = 30.0  # the same between two steps, which name their rate and the time left


@contextmanager
def counted(description: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of counted work: call what this gives with how many are done, and of how many."""
    start = last_line = time.monotonic()
    with bar(TimeRemainingColumn()) as progress:
        task = progress.add_task(description, total=None)
        note(f"{description} …")

        def on_progress(done: int, total: int) -> None:
            nonlocal last_line
            progress.update(task, completed=done, total=total)
            now = time.monotonic()
            if 0 < done < total and now - last_line >= LINE_SECONDS:
                note(f"{description}: {done}/{total}, {(now - start) * (total - done) / done:.0f} s left")
                last_line = now

        yield on_progress


@contextmanager
def status(description: str) -> Iterator[None]:
    """Work that cannot be counted: a moving mark on a terminal, one plain line elsewhere."""
    note(f"{description} …")
    with err.status(description):
        yield


@contextmanager
def bar(*columns: Any) -> Iterator[Progress]:
    """A bar with a count and the elapsed time, then `columns`; invisible where standard error is no terminal."""
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *columns)
    with Progress(*shown, console=err, disable=not err.is_terminal) as progress:
        yield progress


def note(text: str) -> None:
    """A plain line, where no bar says the same."""
    if not err.is_terminal:
        err.print(text, soft_wrap=True)


class TrainingProgress:
    """A bar with losses and stages; plain lines at every tenth of the run and every half minute elsewhere."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self.progress, self.steps = progress, steps
        self.task = progress.add_task("starting", total=steps, losses="")
        self.last: tuple[float, int] | None = None  # when the last line was printed, and at which step

    def phase(self, description: str) -> None:
        """What is done before, between and after the steps."""
        self.progress.update(self.task, description=description)
        note(f"{description} …")

    def step(self, step: int, report: StepReport) -> None:
        """After each step."""
        losses = f"L_gen {report.generalization_loss:.3f} L_loc {report.locality_loss:.4f} |∇| {report.grad_norm:.2g}"
        stages = " ".join(f"{stage} {seconds:.2g}" for stage, seconds in report.seconds.items())
        now = time.monotonic()
        if self.last is None:
            self.last = (now, step)
            self.progress.reset(self.task, total=self.steps, completed=step)  # the bar's rate counts from here
        self.progress.update(
            self.task, description="meta-training", completed=step, losses=f"{losses}\nseconds: {stages}"
        )
        since, first = self.last
        if step % max(1, self.steps // 10) == 0 or step == self.steps or now - since >= STEP_LINE_SECONDS:
            rate = (now - since) / max(1, step - first)
            left = f"{rate * (self.steps - step):.0f} s left" if step > first else ""
            note(f"step {step}/{self.steps}  {losses}  {rate:.2f} s/step ({stages})  {left}")
            self.last = (now, step)

    def event(self, text: str) -> None:
        """A resumption, a lost process: what the user wants to know of."""
        err.print(text)

    def evaluation(self, step: int, scores: Mapping[str, Any]) -> None:
        """After each evaluation on held-out records."""
        shares = [f"{metric.label} {percent(scores[metric.name])}" for metric in METRICS]
        shares.append(f"agreement {percent(scores['locality_agreement'])}")
        err.print(f"step {step}: held-out {' '.join(shares)}")


@contextmanager
def training_progress(steps: int) -> Iterator[TrainingProgress]:
    """Progress of a training run."""
    with bar(TimeRemainingColumn(), TextColumn("{task.fields[losses]}")) as progress:
        yield TrainingProgress(progress, steps)

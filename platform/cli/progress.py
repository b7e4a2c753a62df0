"""Progress on standard error: a bar with the time left on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from malmen.metrics import METRICS
from malmen.platform.cli.output import err, percent

if TYPE_CHECKING:
    from malmen.meta import StepReport

LINE_SECONDS = 2.0  # between two plain lines; no stretch may be silent for 3 seconds
RARER = 0.01  # of the time that has passed, where that is more: a run of a day is not to fill its log
MOST_SECONDS = 30.0  # between two plain lines, at most


@contextmanager
def counted(description: str, *, announced: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Progress of counted work: call what this gives with how many are done, and of how many.

    Without `announced` the first line comes after LINE_SECONDS: an error at the door stays one line.
    """
    began, done, total = time.monotonic(), 0, 0

    def line() -> str:
        seconds = time.monotonic() - began
        if done == 0:
            return f"{description} … {seconds:.0f} s"
        return f"{description}: {done}/{total}, {seconds * (total - done) / done:.0f} s left"

    with bar(TimeRemainingColumn()) as progress, repeating(line):
        task = progress.add_task(description, total=None)
        if announced:
            note(f"{description} …")

        def on_progress(now_done: int, of: int) -> None:
            nonlocal done, total
            done, total = now_done, of
            progress.update(task, completed=done, total=total)

        yield on_progress


@contextmanager
def status(description: str, *, announced: bool = True) -> Iterator[None]:
    """Work that cannot be counted: a moving mark on a terminal, plain lines with its seconds elsewhere."""
    began = time.monotonic()
    if announced:
        note(f"{description} …")
    with err.status(description), repeating(lambda: f"{description} … {time.monotonic() - began:.0f} s"):
        yield


def slow_import(*modules: str) -> None:
    """Import modules that take seconds; a command's own imports of them are quick then."""
    with status("importing libraries", announced=False):
        for module in modules:
            import_module(module)


@contextmanager
def bar(*columns: Any) -> Iterator[Progress]:
    """A bar with a count and the elapsed time, then `columns`; invisible where standard error is no terminal."""
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *columns)
    with Progress(*shown, console=err, disable=not err.is_terminal) as progress:
        yield progress


@contextmanager
def repeating(line: Callable[[], str]) -> Iterator[None]:
    """Print the line as it then is while the block lasts, whatever the block waits for."""
    ended = threading.Event()
    thread = threading.Thread(target=repeat, args=(line, ended.wait), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def repeat(line: Callable[[], str], ended_within: Callable[[float], bool]) -> None:
    """Print the line every LINE_SECONDS until the work has ended; more rarely after some minutes."""
    passed, wait = 0.0, LINE_SECONDS
    while not ended_within(wait):
        note(line())
        passed += wait
        wait = max(LINE_SECONDS, min(MOST_SECONDS, RARER * passed))


def note(text: str) -> None:
    """A plain line, where no bar says the same."""
    if not err.is_terminal:
        err.print(text, soft_wrap=True)


class TrainingProgress:
    """A bar with losses and stages; elsewhere a line for each phase and each tenth of the run, and `line` between."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self.progress, self.steps = progress, steps
        self.task = progress.add_task("starting", total=steps, losses="")
        self.line: Callable[[], str] = lambda: "starting …"
        self.last: tuple[float, int] | None = None  # when the line of a tenth was printed, and at which step

    def phase(self, description: str) -> None:
        """What is done before, between and after the steps."""
        began = time.monotonic()
        self.line = lambda: f"{description} … {time.monotonic() - began:.0f} s"
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
        rate = (now - since) / max(1, step - first)
        left = f"{rate * (self.steps - step):.0f} s left" if step > first else ""
        text = f"step {step}/{self.steps}  {losses}  {rate:.2f} s/step ({stages})  {left}"
        self.line = lambda: text
        if step % max(1, self.steps // 10) == 0 or step == self.steps:
            note(text)
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
        shown = TrainingProgress(progress, steps)
        with repeating(lambda: shown.line()):
            yield shown

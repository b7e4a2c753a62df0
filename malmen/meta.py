"""One meta-training step in one process: the seven stages of Fig. 3."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from malmen.data.tokens import MetaBatch
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.lm.model import LanguageModel
from malmen.lm_side import Caches, LMSide, records_of


@dataclass
class StepReport:
    """What one step cost and gave."""

    generalization_loss: float
    locality_loss: float
    meta_loss: float
    grad_norm: float
    seconds: dict[str, float] = field(default_factory=dict)


class Stopwatch:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def meta_step(lm: LanguageModel, editor: Editor, batch: MetaBatch, caches: Caches | None = None) -> StepReport:
    """Algorithm 2 and the Adam step."""
    watch, side, step = Stopwatch(), LMSide(lm, editor.layers, editor.config, caches), editor.steps_done
    with watch("trace"):  # (i)–(ii)
        traces = side.trace(batch.edits)
    with watch("solve"), naming_records(step, batch):  # (iii)
        editor.observe(traces)
        solved = editor.solve(traces, training=True)
    with watch("meta_loss"):  # (iv)
        losses, shift_grads = side.meta_backward(step, batch, solved.shifts)
    with watch("hypernet"):  # (v)–(vii)
        editor.backward(solved, shift_grads)
    with watch("adam"), naming_records(step, batch):
        editor.step()
    meta_loss = losses.generalization + editor.config.training.locality_coef * losses.locality
    return StepReport(*losses, meta_loss, editor.last_grad_norm, watch.seconds)


@contextmanager
def naming_records(step: int, batch: MetaBatch) -> Iterator[None]:
    """An EditError from inside says which step and records it was."""
    try:
        yield
    except EditError as error:
        raise EditError(f"step {step}: {error}{records_of(batch)}") from error

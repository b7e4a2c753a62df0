"""One meta-training step in one process: the seven stages of Fig. 3."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from malmen.config import Config
from malmen.data.tokens import MetaBatch
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.lm_side import Caches, LMSide, records_of

if TYPE_CHECKING:
    from malmen.lm.model import LanguageModel

_FIRST_STEPS = 20  # after which an editor is expected to have learnt something
_HARDLY = 0.01  # a relative change that counts as none


@dataclass
class StepReport:
    """What one step cost and gave."""

    generalization_loss: float
    locality_loss: float
    meta_loss: float
    locality_coef: float  # λ_loc of this step
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
    coef = side.locality_coef = editor.locality_coef
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
    meta_loss = side.meta_loss(losses)
    side.adjust_locality_coef(losses, batch)
    editor.locality_coef = side.locality_coef
    return StepReport(*losses, meta_loss, coef, editor.last_grad_norm, watch.seconds)


@contextmanager
def naming_records(step: int, batch: MetaBatch) -> Iterator[None]:
    """An EditError from inside says which step and records it was."""
    try:
        yield
    except EditError as error:
        raise EditError(f"step {step}: {error}{records_of(batch)}") from error


def no_progress(history: Sequence[Mapping[str, Any]], config: Config) -> str | None:
    """A warning, once in a run, if its first steps moved η or the meta loss by less than 1 %; else None."""
    coef = config.training.locality_coef
    steps = [row for row in history if "meta_loss" in row]
    if not steps or steps[0]["step"] != 1 or steps[-1]["step"] != config.training.warmup_steps + _FIRST_STEPS:
        return None
    before, after = (steps[place]["edit_lr"] for place in (0, -1))
    moved = max(abs(after[layer] / before[layer] - 1) for layer in before) if before else 1.0
    losses = [row["generalization_loss"] + coef * row["locality_loss"] for row in steps]  # λ_loc may have changed
    early, late = fmean(losses[:5]), fmean(losses[-5:])
    if moved >= _HARDLY and late < (1 - _HARDLY) * early:
        return None
    return (
        f"after {len(steps)} steps, η has changed by {moved:.2g} of itself at most, and the meta loss from {early:.3g} "
        f"to {late:.3g}: this editor hardly learns. Raise training.meta_lr ({config.training.meta_lr:g}), lower "
        f"training.locality_coef ({coef:g}), or use preset=fast"
        + (
            "; editor.parametrisation=relative needs learning rates 10 to 1000 times the paper's"
            if config.editor.parametrisation == "relative"
            else ""
        )
    )

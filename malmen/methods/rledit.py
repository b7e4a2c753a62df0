"""RLEdit: MALMEN's hyper-network and solve, trained on trajectories of edits of the model that is edited already.

The loss after batch t of a trajectory, with S = S_1 + … + S_t laid over the LM, is

    Σ_{i < window} discount^i (L_gen of batch t−i + λ_loc · KL(previous ‖ new edited model) on its unrelated facts),

and a trajectory's loss their sum over t. Shifts add, so its gradient for S_j is the sum of the gradients for S of the
losses from batch j on. Traces and the previous model are constants, as are all inputs of MALMEN's hyper-network. One
Adam step per trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from malmen.config import Config
from malmen.data.tokens import MetaBatch, TokenBatch
from malmen.editor import Editor, Solved
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import Overlay, edited
from malmen.lm.stem import Stem
from malmen.lm_side import LMSide, MetaLosses
from malmen.meta import StepReport, Stopwatch, naming_records


def rledit_settings(config: Config) -> dict[str, Any]:
    """The settings of a run, by `section.key`, that train RLEdit in MALMEN's place."""
    own = config.baselines.rledit.model_dump()
    return {"training.locality_target": None} | {f"training.{key}": value for key, value in own.items()}


class TrajectorySide(LMSide):
    """An LM that is edited again and again: what must stay is what the model before the newest edit predicts."""

    def __init__(self, lm: LanguageModel, editor: Editor) -> None:
        super().__init__(lm, editor.layers, editor.config)
        self.locality_coef = editor.locality_coef
        self.before = Overlay.of(lm, {})

    def reference(self, batch: TokenBatch, stem: Stem, top: Stem) -> Tensor:
        """log p (tokens, vocabulary) of the model as the edits before the newest left it."""
        with edited(self.lm, self.before):
            return super().reference(batch, stem, top)

    def window_backward(
        self, step: int, window: Sequence[MetaBatch], shifts: Mapping[str, Tensor]
    ) -> tuple[MetaLosses, dict[str, Tensor]]:
        """L_gen and L_loc after the last of these batches, discounted and summed over them, and ∇_W̃ of
        L_gen + λ_loc·L_loc by layer."""
        discount, losses = self.config.training.trajectory_discount, MetaLosses(0.0, 0.0)
        grads: dict[str, Tensor] = {}
        for batch in window:
            part, part_grads = self.meta_backward(step, batch, shifts)
            losses = MetaLosses(*(discount * old + new for old, new in zip(losses, part, strict=True)))
            grads = _sum({name: discount * grad for name, grad in grads.items()}, part_grads)
        return losses, grads


def trajectory_step(lm: LanguageModel, editor: Editor, batches: Sequence[MetaBatch]) -> StepReport:
    """One trajectory and its Adam step. The losses that it reports are sums over the trajectory.

    All batches are normalised alike: by what the editor has seen before, and the first batch. It learns the statistics
    of the others at the end, so that `Editor.backward` computes what `Editor.solve` did.
    """
    watch, side, step = Stopwatch(), TrajectorySide(lm, editor), editor.steps_done
    losses, shifts = MetaLosses(0.0, 0.0), dict[str, Tensor]()
    solved: list[Solved] = []
    grads: list[dict[str, Tensor]] = []  # of the loss after each batch, for the sum of shifts up to it
    for number, batch in enumerate(batches):
        side.before = Overlay.of(lm, shifts)
        with watch("trace"), edited(lm, side.before):
            traces = side.trace(batch.edits)
        with watch("solve"), naming_records(step, batch):
            if number == 0:
                editor.observe(traces)
            solved.append(editor.solve(traces, training=True))
        shifts = _sum(shifts, solved[-1].shifts)
        with watch("meta_loss"):
            window = batches[max(0, number + 1 - editor.config.training.trajectory_window) : number + 1]
            part, part_grads = side.window_backward(step, window, shifts)
        grads.append(part_grads)
        losses = MetaLosses(*(old + new for old, new in zip(losses, part, strict=True)))
    with watch("hypernet"):
        later: dict[str, Tensor] = {}
        for one, own in zip(reversed(solved), reversed(grads), strict=True):
            later = _sum(later, own)
            editor.backward(one, later)
    with watch("adam"), naming_records(step, _joined(batches)):
        editor.step()
    for one in solved[1:]:
        editor.observe(one.traces)
    return StepReport(*losses, side.meta_loss(losses), side.locality_coef, editor.last_grad_norm, watch.seconds)


def _sum(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By layer; what `one` lacks is 0."""
    return {name: one[name] + part if name in one else part for name, part in other.items()}


def _joined(batches: Sequence[MetaBatch]) -> MetaBatch:
    """All edits of a trajectory, for messages."""
    edits = [fact for batch in batches for fact in batch.edits]
    return MetaBatch(edits, [], [], [name for batch in batches for name in batch.record_ids])

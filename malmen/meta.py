"""The meta loss of eq. 1 and one meta-training step: the seven stages of Fig. 3 in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.layers import LayerSpec
from malmen.lm import LanguageModel, keep_stem, resume_stem, stem_blocks
from malmen.losses import kl, nll
from malmen.overlay import edited
from malmen.trace import trace


@dataclass(frozen=True)
class MetaBatch:
    """The tuples of one step; `record_ids` name the edits in errors."""

    edits: Sequence[EncodedFact]
    equivalents: Sequence[EncodedFact]
    unrelated: Sequence[EncodedFact]
    record_ids: Sequence[str] = ()


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


def meta_step(lm: LanguageModel, editor: Editor, batch: MetaBatch) -> StepReport:
    """Algorithm 2 and the Adam step."""
    budget, watch = editor.config.batch.token_budget, Stopwatch()
    coef = editor.config.training.locality_coef
    with watch("trace"):  # (i)–(ii)
        traces = trace(lm, editor.layers, make_batches(batch.edits, budget, lm.pad_id), editor.config.editor.tokens)
    with watch("solve"):  # (iii)
        editor.observe(traces)
        solved = editor.solve(traces, training=True)
    with watch("meta_loss"):  # (iv)
        dtype = torch.promote_types(lm.dtype, torch.float32)  # gradients are summed over micro-batches in it
        leaves = {name: shift.to(dtype, copy=True).requires_grad_() for name, shift in solved.shifts.items()}
        equivalents = make_batches(batch.equivalents, budget, lm.pad_id)
        unrelated = make_batches(batch.unrelated, budget, lm.pad_id)
        generalization = generalization_backward(lm, leaves, equivalents, 1 / max(1, len(batch.equivalents)))
        locality = locality_backward(lm, editor.layers, leaves, unrelated, 1 / max(1, len(batch.unrelated)), coef)
    meta_loss = generalization + coef * locality
    _check_finite(meta_loss, editor.steps_done, batch)
    with watch("hypernet"):  # (v)–(vii)
        editor.backward(solved, {name: _grad(leaf) for name, leaf in leaves.items()})
    with watch("adam"):
        editor.step()
    return StepReport(generalization, locality, meta_loss, editor.last_grad_norm, watch.seconds)


def generalization_backward(
    lm: LanguageModel, leaves: Mapping[str, Tensor], batches: Sequence[TokenBatch], scale: float
) -> float:
    """Add the gradient of L_gen to the leaves. `scale` is one over the global number of tuples."""
    total = 0.0
    for batch in batches:
        batch = batch.to(lm.device)
        with edited(lm, leaves):
            loss = nll(lm.log_probs(batch), batch.targets) * scale
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def locality_backward(
    lm: LanguageModel,
    layers: list[LayerSpec],
    leaves: Mapping[str, Tensor],
    batches: Sequence[TokenBatch],
    scale: float,
    coef: float,
) -> float:
    """Add the gradient of coef·L_loc to the leaves; what lies below every edit is computed once for both forwards."""
    blocks = stem_blocks(lm, layers)
    total = 0.0
    for batch in batches:
        batch = batch.to(lm.device)
        with torch.no_grad(), keep_stem(lm, blocks) as stem:
            reference = lm.log_probs(batch)
        with edited(lm, leaves), resume_stem(lm, blocks, stem):
            loss = kl(reference, lm.log_probs(batch)) * scale
        if coef > 0:
            (coef * loss).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _check_finite(meta_loss: float, step: int, batch: MetaBatch) -> None:
    if meta_loss != meta_loss or abs(meta_loss) == float("inf"):
        some = ", ".join(batch.record_ids[:5])
        raise EditError(
            f"step {step}: the meta loss is {meta_loss}; the records were {some} … ({len(batch.edits)} edits)"
        )

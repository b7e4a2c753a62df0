"""The meta loss of eq. 1 and one meta-training step: the seven stages of Fig. 3 in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.lm.layers import LayerSpec
from malmen.lm.losses import kl, nll
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import edited
from malmen.lm.stem import (
    all_blocks,
    cache_kinds,
    keep_stem,
    recall_stem,
    remember_stem,
    resume_stem,
    stem_blocks,
)
from malmen.lm.trace import Cut, trace_facts
from malmen.runs.fact_cache import FactCache

Caches = Mapping[str, FactCache]  # by role: edits, equivalents, unrelated; the roles whose facts come again


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


def meta_step(lm: LanguageModel, editor: Editor, batch: MetaBatch, caches: Caches | None = None) -> StepReport:
    """Algorithm 2 and the Adam step."""
    watch, caches, coef = Stopwatch(), caches or {}, editor.config.training.locality_coef

    def cut(facts: Sequence[EncodedFact]) -> list[TokenBatch]:
        return make_batches(facts, editor.config.batch.token_budget, lm.pad_id)

    with watch("trace"):  # (i)–(ii)
        traces = trace_facts(lm, editor.layers, batch.edits, editor.config.editor.tokens, cut, caches.get("edits"))
    with watch("solve"), naming_records(editor.steps_done, batch):  # (iii)
        editor.observe(traces)
        solved = editor.solve(traces, training=True)
    with watch("meta_loss"):  # (iv)
        leaves = make_leaves(lm, solved.shifts)
        scales = (1 / max(1, len(batch.equivalents)), 1 / max(1, len(batch.unrelated)))
        losses = meta_backward(lm, editor.layers, leaves, batch, scales, coef, cut, caches)
    meta_loss = losses[0] + coef * losses[1]
    shift_grads = leaf_grads(leaves)
    check_finite(meta_loss, shift_grads, editor.steps_done, batch)
    with watch("hypernet"):  # (v)–(vii)
        editor.backward(solved, shift_grads)
    with watch("adam"), naming_records(editor.steps_done, batch):
        editor.step()
    return StepReport(*losses, meta_loss, editor.last_grad_norm, watch.seconds)


def make_leaves(lm: LanguageModel, shifts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shifts as leaves, whose gradients are ∇_W̃ L_meta; summed over micro-batches in float32 at least."""
    dtype = torch.promote_types(lm.dtype, torch.float32)
    return {name: shift.to(lm.device, dtype, copy=True).requires_grad_() for name, shift in shifts.items()}


def leaf_grads(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """∇_W̃ L_meta by layer, once everything was run; zero where nothing was."""
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def meta_backward(
    lm: LanguageModel, layers: list[LayerSpec], leaves: Mapping[str, Tensor], batch: MetaBatch,
    scales: tuple[float, float], coef: float, cut: Cut, caches: Caches,
) -> tuple[float, float]:  # fmt: skip
    """Stage (iv): add the gradient of L_gen + coef·L_loc to the leaves. `scales` are one over the global counts."""
    generalization = generalization_backward(
        lm, layers, leaves, batch.equivalents, scales[0], cut, caches.get("equivalents")
    )
    locality = locality_backward(lm, layers, leaves, batch.unrelated, scales[1], coef, cut, caches.get("unrelated"))
    return generalization, locality


def generalization_backward(
    lm: LanguageModel, layers: list[LayerSpec], leaves: Mapping[str, Tensor], facts: Sequence[EncodedFact],
    scale: float, cut: Cut, cache: FactCache | None = None,
) -> float:  # fmt: skip
    """Add the gradient of L_gen to the leaves; facts whose stem is in the cache start above it."""
    blocks = stem_blocks(lm, layers)
    known, fresh = _split(cache, cache_kinds(lm, blocks), facts)
    total = 0.0
    for batch in cut(fresh):
        batch = batch.to(lm.device)
        with edited(lm, leaves), keep_stem(lm, blocks if cache else {}) as stem:
            total += _nll_backward(lm, batch, scale)
        if cache:
            remember_stem(cache, lm, batch, fresh, [(blocks, stem)])
    for batch in cut(known):
        batch = batch.to(lm.device)
        assert cache is not None
        with edited(lm, leaves), resume_stem(lm, blocks, recall_stem(cache, lm, batch, known, blocks)):
            total += _nll_backward(lm, batch, scale)
    return total


def locality_backward(
    lm: LanguageModel, layers: list[LayerSpec], leaves: Mapping[str, Tensor], facts: Sequence[EncodedFact],
    scale: float, coef: float, cut: Cut, cache: FactCache | None = None,
) -> float:  # fmt: skip
    """Add the gradient of coef·L_loc to the leaves; what lies below every edit is computed once for both forwards.

    Of a fact in the cache the unedited model runs its final norm and head only, the edited one starts above the stem.
    """
    blocks, everything = stem_blocks(lm, layers), all_blocks(lm)
    known, fresh = _split(cache, cache_kinds(lm, blocks, everything), facts)
    total = 0.0
    for batch in cut(fresh):
        batch = batch.to(lm.device)
        with torch.no_grad(), keep_stem(lm, blocks) as stem, keep_stem(lm, everything if cache else {}) as top:
            reference = lm.log_probs(batch)
        with edited(lm, leaves), resume_stem(lm, blocks, stem):
            total += _kl_backward(lm, batch, reference, scale, coef)
        if cache:
            remember_stem(cache, lm, batch, fresh, [(blocks, stem), (everything, top)])
    for batch in cut(known):
        batch = batch.to(lm.device)
        assert cache is not None
        with torch.no_grad(), resume_stem(lm, everything, recall_stem(cache, lm, batch, known, everything)):
            reference = lm.log_probs(batch)
        with edited(lm, leaves), resume_stem(lm, blocks, recall_stem(cache, lm, batch, known, blocks)):
            total += _kl_backward(lm, batch, reference, scale, coef)
    return total


def check_finite(meta_loss: float, shift_grads: Mapping[str, Tensor], step: int, batch: MetaBatch) -> None:
    """EditError with step, layers and records where loss or gradient is not finite."""
    broken = [name for name, grad in shift_grads.items() if not bool(torch.isfinite(grad).all())]
    if not math.isfinite(meta_loss) or broken:
        where = f"; the gradient is not finite in {', '.join(broken)}" if broken else ""
        raise EditError(f"step {step}: the meta loss is {meta_loss}{where}{_records(batch)}")


@contextmanager
def naming_records(step: int, batch: MetaBatch) -> Iterator[None]:
    """What cannot be solved, or is not finite then: which step and records it was."""
    try:
        yield
    except EditError as error:
        raise EditError(f"step {step}: {error}{_records(batch)}") from error


def _records(batch: MetaBatch) -> str:
    return f"; the records were {', '.join(batch.record_ids[:5])} … ({len(batch.edits)} edits)"


def _nll_backward(lm: LanguageModel, batch: TokenBatch, scale: float) -> float:
    loss = nll(lm.log_probs(batch), batch.targets) * (scale if batch.counts else 0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _kl_backward(lm: LanguageModel, batch: TokenBatch, reference: Tensor, scale: float, coef: float) -> float:
    loss = kl(reference, lm.log_probs(batch)) * (scale if batch.counts else 0.0)
    if coef > 0:
        (coef * loss).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _split(
    cache: FactCache | None, kinds: list[str], facts: Sequence[EncodedFact]
) -> tuple[list[EncodedFact], list[EncodedFact]]:
    if cache is None:
        return [], list(facts)
    known, fresh = cache.split(kinds, facts)
    return [fact for _, fact in known], [fact for _, fact in fresh]

"""How far an edited model drifts from the unedited one along the unedited model's own words.

Answers to given questions say little here: where the unedited model is unsure, rounding alone changes them. Its own
greedy text is what users read, so that is what must not change. The floor is the same measure of the unedited model
with its weights rounded to bfloat16: what nobody would call an edit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from malmen.data.tokens import EncodedFact, make_batches, one_batch
from malmen.lm.generate import OnProgress
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import Overlay, Shifts, edited

SURE = 0.5  # nats between the two most probable tokens, from which on the unedited model is sure of the first
LENGTHS = (10, 20)  # tokens over which a text is compared


@dataclass(frozen=True)
class Drift:
    """Over the tokens of texts that the unedited model has written."""

    kl: float  # KL(unedited ‖ edited) in nats, the mean over tokens
    kl_p95: float  # its 95th percentile
    agreement: float  # share of tokens where both find the same token most probable
    sure_agreement: float | None  # the same, of tokens where the unedited model is sure
    unchanged_10: float  # share of texts whose first 10 greedy tokens are all the same
    unchanged_20: float


def drift_of_edit(
    lm: LanguageModel, texts: Sequence[EncodedFact], shifts: Shifts, token_budget: int,
    on_progress: OnProgress | None = None, read: Sequence[EncodedFact] | None = None,
) -> Drift:  # fmt: skip
    """Drift of the model under these shifts, along texts that the unedited one has written greedily.

    `read` are these texts as the edited model reads them, where their prompts are rewritten.
    """
    overlay = Overlay.of(lm, shifts)
    return _measure(lm, texts, lambda: edited(lm, overlay), token_budget, on_progress, read)


def drift_of_rounding(
    lm: LanguageModel, texts: Sequence[EncodedFact], token_budget: int, on_progress: OnProgress | None = None
) -> Drift | None:
    """The floor; None for a model that is in bfloat16 already."""
    if lm.dtype == torch.bfloat16:
        return None
    return _measure(lm, texts, lambda: _rounded(lm), token_budget, on_progress)


@torch.no_grad()
def _measure(
    lm: LanguageModel,
    texts: Sequence[EncodedFact],
    changed: Callable[[], AbstractContextManager[None]],
    token_budget: int,
    on_progress: OnProgress | None,
    read: Sequence[EncodedFact] | None = None,
) -> Drift:
    divergences, same, sure = [], [], []
    unchanged = dict.fromkeys(LENGTHS, 0)
    done = 0
    for batch in make_batches(texts if read is None else read, token_budget, lm.pad_id):
        batch = written = batch.to(lm.device)
        if read is not None:
            written = one_batch([texts[index] for index in batch.facts.tolist()], lm.pad_id).to(lm.device)
        reference = lm.log_probs(written)
        with changed():
            log_probs = lm.log_probs(batch)
        divergences.append((reference.exp() * (reference - log_probs)).sum(-1).cpu())
        best = reference.topk(2)
        agrees = best.indices[:, 0] == log_probs.argmax(-1)
        same.append(agrees.cpu())
        sure.append((best.values[:, 0] - best.values[:, 1] >= SURE).cpu())
        fact_of = batch.fact_of(batch.answer_mask)
        for fact in batch.facts:
            tokens = agrees[fact_of == fact]
            for length in LENGTHS:
                unchanged[length] += int(tokens[:length].all())
        done += len(batch.facts)
        if on_progress:
            on_progress(done, len(texts))
    kl, agreement, where_sure = torch.cat(divergences).double(), torch.cat(same), torch.cat(sure)
    return Drift(
        float(kl.mean()),
        float(kl.quantile(0.95)),
        float(agreement.double().mean()),
        float(agreement[where_sure].double().mean()) if bool(where_sure.any()) else None,
        *(unchanged[length] / len(texts) for length in LENGTHS),
    )


@contextmanager
def _rounded(lm: LanguageModel) -> Iterator[None]:
    """Inside, every weight is rounded to bfloat16."""
    kept = [(weight, weight.detach().clone()) for weight in lm.model.parameters()]
    try:
        with torch.no_grad():
            for weight, _ in kept:
                weight.copy_(weight.to(torch.bfloat16))
        yield
    finally:
        with torch.no_grad():
            for weight, exact in kept:
                weight.copy_(exact)

"""The meta-gradient as MEND computes it: hyper-network, normal equation and LM in one graph (the paper's Fig. 2).

It gives the same shifts and gradient as `malmen.meta.meta_step`, and its memory is compared with that step's: here all
activations of all edits are held at the same time.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

from malmen.data.tokens import MetaBatch, one_batch
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.hypernet import HyperNetwork, run_in_batches
from malmen.least_squares import solve_least_squares
from malmen.lm.losses import kl, nll
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import edited
from malmen.lm.trace import trace
from malmen.preserved import Preserved, TermMoments


def concatenated_backward(lm: LanguageModel, editor: Editor, batch: MetaBatch) -> None:
    """Add ∇_θ L_meta to the gradients of θ by autograd through one graph, without micro-batches."""
    settings = editor.config.editor
    if settings.aggregation != "least_squares" or not settings.regularisation:
        raise EditError(
            "one graph needs editor.aggregation=least_squares and editor.regularisation=true; given are "
            f"{settings.aggregation} and {settings.regularisation}"
        )
    if not batch.equivalents or not batch.unrelated:
        raise EditError("one graph needs equivalents and unrelated facts in the step; the records have none")
    edits, equivalents, unrelated = (
        one_batch(facts, lm.pad_id).to(lm.device) for facts in (batch.edits, batch.equivalents, batch.unrelated)
    )
    traces = trace(lm, editor.layers, [edits], settings.tokens)
    editor.observe(traces)
    shifts = {}
    for shape, members in editor.groups.items():
        net = cast(HyperNetwork, editor.nets[shape])
        (parts,) = run_in_batches(net, [layer.name for layer in members], traces, sys.maxsize, grad=True)
        for index, part in enumerate(parts):
            damping: Any = net.damping()[index]  # a tensor, for its gradient
            preserved = None
            if net.terms:
                moments = TermMoments([moment[index] for moment in net.term_moments()], settings.preserved_null_space)
                weights: Any = net.weights(index)  # tensors, for the same reason
                preserved = Preserved(moments, weights)
            keys, diffs = traces[part.layer].keys, part.value_diffs()
            if part.weight_roots is not None:
                roots = part.weight_roots[:, None]
                keys, diffs = keys.to(roots) * roots, diffs * roots
            solution = solve_least_squares(keys, diffs, damping, preserved)
            shifts[part.layer] = solution.shift.to(lm.dtype)
    with torch.no_grad():
        reference = lm.log_probs(unrelated)
    with edited(lm, shifts):
        loss = nll(lm.log_probs(equivalents), equivalents.targets) / len(batch.equivalents)
        drift = kl(reference, lm.log_probs(unrelated)) / len(batch.unrelated)
    (loss + editor.config.training.locality_coef * drift).backward()  # type: ignore[no-untyped-call]

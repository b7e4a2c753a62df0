"""The meta-gradient as MEND computes it: hyper-network, normal equation and LM in one graph (the paper's Fig. 2).

It gives the same shifts and gradient as `malmen.meta.meta_step`, and its memory is compared with that step's: here all
activations of all edits are held at the same time.
"""

from __future__ import annotations

import sys
from typing import cast

import torch
from torch import Tensor

from malmen.data.tokens import MetaBatch, make_batches
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.hypernet import HyperNetwork
from malmen.lm.losses import kl, nll
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import edited
from malmen.lm.trace import LayerTrace, trace


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
        make_batches(facts, sys.maxsize, lm.pad_id)[0].to(lm.device)
        for facts in (batch.edits, batch.equivalents, batch.unrelated)
    )
    traces = trace(lm, editor.layers, [edits], editor.config.editor.tokens)
    editor.observe(traces)
    shifts = {}
    for shape, members in editor.groups.items():
        net = cast(HyperNetwork, editor.nets[shape])
        for index, layer in enumerate(members):
            shifts[layer.name] = _shift(net, index, traces[layer.name], settings.preserved_weight).to(lm.dtype)
    with torch.no_grad():
        reference = lm.log_probs(unrelated)
    with edited(lm, shifts):
        loss = nll(lm.log_probs(equivalents), equivalents.targets) / len(batch.equivalents)
        drift = kl(reference, lm.log_probs(unrelated)) / len(batch.unrelated)
    (loss + editor.config.training.locality_coef * drift).backward()  # type: ignore[no-untyped-call]


def _shift(net: HyperNetwork, index: int, traced: LayerTrace, preserved_weight: float) -> Tensor:
    """S* of a layer, with its graph; by the smaller of the two forms."""
    members = torch.full((len(traced.keys),), index, device=traced.keys.device)
    keys = traced.keys.to(net.log_damping)
    pseudo_keys, scaled_grads = net(members, keys, traced.value_grads)
    diffs = ((pseudo_keys * keys).sum(-1, keepdim=True) * scaled_grads).double()
    rows, damping = traced.keys.double(), net.damping()[index]
    if len(rows) < rows.shape[1] and net.moments is None:
        factor = torch.linalg.cholesky(rows @ rows.T + damping * torch.eye(len(rows)).to(rows))
        return torch.cholesky_solve(diffs, factor).T @ rows
    gram = rows.T @ rows if net.moments is None else rows.T @ rows + preserved_weight * net.moments[index].double()
    factor = torch.linalg.cholesky(gram + damping * torch.eye(rows.shape[1]).to(rows))
    return torch.cholesky_solve(rows.T @ diffs, factor).T

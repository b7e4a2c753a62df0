"""Keys and value gradients of the edited layers: stages (i) and (ii) of Fig. 3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from malmen.data.tokens import TokenBatch
from malmen.lm.answer_rows import answer_grads_only, answers_only
from malmen.lm.devices import release_freed_memory
from malmen.lm.hooks import hooked
from malmen.lm.layers import LayerSpec
from malmen.lm.losses import nll

if TYPE_CHECKING:
    from malmen.lm.model import LanguageModel


class LayerTrace(NamedTuple):
    """Keys and value gradients of one layer; rows are tokens."""

    keys: Tensor  # u (tokens, key)
    value_grads: Tensor  # ∇_v L (tokens, value)


Traces = dict[str, LayerTrace]


def trace(lm: LanguageModel, layers: Sequence[LayerSpec], batches: Iterable[TokenBatch], tokens: str) -> Traces:
    """Back-propagate L = −Σ log p(y|x) over the batches, as far as the first edited layer and no further.

    A hook on each layer keeps its input and adds a probe of zeros to its output, whose gradient is ∇_v L. No weight
    takes a gradient. L is a sum over tokens, so batches do not mix. Rows come in the order of the facts.
    """
    parts: dict[str, list[tuple[Tensor, ...]]] = {layer.name: [] for layer in layers}
    for number, batch in enumerate(batches):
        if number:
            release_freed_memory()  # micro-batches of many shapes fragment the heap
        traced = _trace_batch(lm, layers, batch.to(lm.device), tokens)
        for name, rows in traced.items() if batch.counts else ():
            parts[name].append(rows)
    # `pop`: while one layer's rows are put in order, they alone are held twice.
    return {layer.name: _in_order(lm, layer, parts.pop(layer.name)) for layer in layers}


def _trace_batch(
    lm: LanguageModel, layers: Sequence[LayerSpec], batch: TokenBatch, tokens: str
) -> dict[str, tuple[Tensor, ...]]:
    """By layer, of each token that is used: its key, its value gradient and its fact."""
    keys: dict[str, Tensor] = {}
    probes: dict[str, Tensor] = {}

    def probe(name: str, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        keys[name] = args[0].detach()
        probes[name] = torch.zeros_like(output, requires_grad=True)
        return output + probes[name]

    hooks = [(lm.model.get_submodule(layer.name), partial(probe, layer.name)) for layer in layers]
    with ExitStack() as spared, hooked(hooks), torch.enable_grad():
        if tokens == "answer":
            spared.enter_context(answer_grads_only(lm, batch))
            spared.enter_context(answers_only(lm, batch))
        edit_loss = nll(lm.log_probs(batch), batch.targets)
    grads = dict(zip(probes, torch.autograd.grad(edit_loss, list(probes.values())), strict=True))
    rows = {}
    for layer in layers:
        mask = batch.traced_mask(layer.stack, tokens)
        seen = (rows_at(mask, part[layer.name]).to(lm.device) for part in (keys, grads))
        rows[layer.name] = (*seen, batch.fact_of(mask))
    return rows


def rows_at(mask: Tensor, seen: Tensor) -> Tensor:
    """The rows of a layer's input or output at the True places of a mask (facts, length). OPT's FFN sees the tokens of
    all facts in one row."""
    return seen.reshape(*mask.shape, seen.shape[-1])[mask.to(seen.device)]


def _in_order(lm: LanguageModel, layer: LayerSpec, parts: list[tuple[Tensor, ...]]) -> LayerTrace:
    if not parts:
        sizes = (layer.key_size, layer.value_size)
        return LayerTrace(*(torch.zeros(0, size, dtype=lm.dtype, device=lm.device) for size in sizes))
    keys, value_grads, facts = (torch.cat(rows) for rows in zip(*parts, strict=True))
    parts.clear()
    order = facts.argsort(stable=True)
    return LayerTrace(keys[order], value_grads[order])

"""The hyper-network over many tokens, in batches of any size: no result depends on how they are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from malmen.hypernet import HyperNetwork
from malmen.trace import LayerTrace, Traces


@dataclass
class HypernetRows:
    """The hyper-network's output for some consecutive tokens of one layer."""

    layer: str
    rows: slice
    pseudo_keys: Tensor  # ũ (rows, key)
    scaled_grads: Tensor  # −η ∇̃_v L (rows, value)
    keys: Tensor  # u (rows, key)

    def value_diffs(self) -> Tensor:
        """d_j = S_j u_j = −η (ũ_jᵀu_j) ∇̃_v L (rows, value); S_j itself is never formed."""
        return (self.pseudo_keys * self.keys).sum(-1, keepdim=True) * self.scaled_grads


def run_in_batches(
    net: HyperNetwork, layers: Sequence[str], traces: Traces, rows_at_once: int, *, grad: bool
) -> Iterator[list[HypernetRows]]:
    """The network over all tokens of its layers, of which some may have no traces here."""
    counts = [len(traces[name].keys) if name in traces else 0 for name in layers]
    for batch in _cut(counts, rows_at_once):
        parts = [LayerTrace(*(part[rows] for part in traces[layers[index]])) for index, rows in batch]
        sizes = [len(part.keys) for part in parts]
        keys = torch.cat([part.keys for part in parts]).to(net.log_edit_lr)
        value_grads = torch.cat([part.value_grads for part in parts])
        members = torch.cat([torch.full((size,), index) for (index, _), size in zip(batch, sizes, strict=True)])
        with torch.set_grad_enabled(grad):
            pseudo_keys, scaled_grads = net(members.to(keys.device), keys, value_grads)
        outputs = zip(batch, pseudo_keys.split(sizes), scaled_grads.split(sizes), keys.split(sizes), strict=True)
        yield [HypernetRows(layers[index], rows, *some) for (index, rows), *some in outputs]


def _cut(counts: Sequence[int], rows_at_once: int) -> list[list[tuple[int, slice]]]:
    """Cut members of these sizes, laid end to end, into batches of (member, rows)."""
    batches: list[list[tuple[int, slice]]] = []
    room = 0
    for member, count in enumerate(counts):
        start = 0
        while start < count:
            if room == 0:
                batches.append([])
                room = rows_at_once
            stop = min(count, start + room)
            batches[-1].append((member, slice(start, stop)))
            room -= stop - start
            start = stop
    return batches

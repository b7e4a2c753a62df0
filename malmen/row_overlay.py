"""Several edits laid over one frozen model at the same time, each over its own rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from malmen.lm import LanguageModel
from malmen.overlay import Shifts, linear_of, upright_weight


@dataclass(frozen=True)
class Overlay:
    """An edit, ready to be laid over: as much memory as its shifts, and no more work per token than without it."""

    weights: dict[str, Tensor]  # W + S (value, key)
    shifts: dict[str, Tensor]  # S, where W is in half precision (which would swallow a small S) or sharded

    @classmethod
    def of(cls, lm: LanguageModel, shifts: Shifts) -> Overlay:
        """An edit of this model."""
        weights, added = {}, {}
        for name, shift in shifts.items():
            module = linear_of(lm, name, shift)
            weight = module.get_parameter("weight")
            if weight.dtype in (torch.float32, torch.float64) and not hasattr(weight, "ds_id"):
                weights[name] = upright_weight(module) + shift.to(weight)
            else:
                added[name] = shift.to(weight.device, weight.dtype)
        return cls(weights, added)

    def num_bytes(self) -> int:
        """The memory it takes."""
        return sum(part.nbytes for part in (*self.weights.values(), *self.shifts.values()))


@contextmanager
def edited_rows(lm: LanguageModel, overlays: Sequence[tuple[Overlay | None, int]]) -> Iterator[None]:
    """Inside, the first rows of every batch see the first edit, and so on: (edit or None, number of rows)."""
    names = {name for overlay, _ in overlays if overlay for name in (*overlay.weights, *overlay.shifts)}
    changed: list[tuple[nn.Module, str, Any]] = []
    try:
        for name in names:
            module = lm.model.get_submodule(name)
            inner = "_old_forward" if hasattr(module, "_hf_hook") else "forward"  # accelerate's hook stays around it
            before = module.__dict__.get(inner)
            assert before is None or inner == "_old_forward", f"{name} is edited already"
            module.__dict__[inner] = _forward(module, name, overlays)
            changed.append((module, inner, before))
        yield
    finally:
        for module, inner, before in changed:
            if before is None:
                del module.__dict__[inner]
            else:
                module.__dict__[inner] = before


def _forward(
    module: nn.Module, name: str, overlays: Sequence[tuple[Overlay | None, int]]
) -> Callable[[Tensor], Tensor]:
    bias = module._parameters.get("bias")
    plain = type(module).forward
    sizes = [rows for _, rows in overlays]

    def part(overlay: Overlay | None, keys: Tensor) -> Tensor:
        if overlay and name in overlay.weights:
            return F.linear(keys, overlay.weights[name], bias)
        values: Tensor = plain(module, keys)
        return values + F.linear(keys, overlay.shifts[name]) if overlay and name in overlay.shifts else values

    def forward(keys: Tensor) -> Tensor:
        if len(overlays) == 1:
            return part(overlays[0][0], keys)
        rows = keys.unflatten(0, (sum(sizes), -1)) if keys.dim() == 2 else keys  # as in OPT's FFN
        assert rows.shape[0] == sum(sizes), (tuple(keys.shape), sizes)
        pieces = zip(overlays, rows.split(sizes), strict=True)
        values = torch.cat([part(overlay, some) for (overlay, _), some in pieces])
        return values.reshape(*keys.shape[:-1], values.shape[-1])

    return forward

"""An edit laid over a frozen language model: `with edited(lm, shifts): …`. No weight is written, sharded or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from malmen.errors import EditError
from malmen.lm.hooks import innermost_forward, replaced_forward
from malmen.lm.layers import is_conv1d, is_linear, layer_sizes

if TYPE_CHECKING:
    from malmen.lm.model import LanguageModel

Shifts = Mapping[str, Tensor]  # layer name -> S (value, key)


@contextmanager
def edited(lm: LanguageModel, edit: Shifts | Overlay) -> Iterator[None]:
    """Inside, each named layer computes (W + S)u + bias; an edit inside another one adds to it.

    Where a shift is a leaf that requires a gradient, its `.grad` is ∇_W̃ of what is run inside.
    """
    with edited_rows(lm, [(edit if isinstance(edit, Overlay) else Overlay.of(lm, edit), 0)]):
        yield


@contextmanager
def edited_rows(lm: LanguageModel, overlays: Sequence[tuple[Overlay | None, int]]) -> Iterator[None]:
    """Inside, the first rows of every batch see the first edit, and so on: (edit or None, number of rows). All rows see
    the only edit there is."""
    names = {name for overlay, _ in overlays if overlay for name in (*overlay.weights, *overlay.shifts)}
    forwards = [_EditedForward(lm.model.get_submodule(name), name, overlays) for name in names]
    with replaced_forward([(forward.module, forward) for forward in forwards], attribute=innermost_forward):
        yield


@dataclass(frozen=True)
class Overlay:
    """An edit, ready to be laid over: as much memory as its shifts, and no more work per token than without it."""

    weights: dict[str, Tensor]  # W + S (value, key)
    shifts: dict[str, Tensor]  # S (value, key), of layers where W + S cannot stand for W; perhaps in a wider type

    @classmethod
    def of(cls, lm: LanguageModel, shifts: Shifts) -> Overlay:
        """An edit of this model. W + S formed once saves a product per token, but it needs the whole weight and digits
        to spare: half precision would swallow a small S. Inside another edit, whose shift it would drop, S is added."""
        weights, added = {}, {}
        for name, shift in shifts.items():
            module = linear_of(lm, name, shift)
            weight = module.get_parameter("weight")
            sharded = hasattr(weight, "ds_id")  # DeepSpeed marks the parameters that it shards
            if weight.dtype in (torch.float32, torch.float64) and not sharded and not _is_edited(module):
                weights[name] = upright_weight(module) + shift.to(weight)
            else:
                added[name] = shift.to(weight.device, weight.dtype)
        return cls(weights, added)

    @classmethod
    def of_leaves(cls, lm: LanguageModel, shifts: Shifts) -> Overlay:
        """An edit whose tensors collect ∇_W̃ of all that is run under it, in float32 at least: W + S is formed once."""
        overlay, wide = cls.of(lm, shifts), torch.promote_types(lm.dtype, torch.float32)
        added = {name: shifts[name].to(shift.device, wide, copy=True) for name, shift in overlay.shifts.items()}
        leaves = cls(overlay.weights, added)
        for leaf in (*leaves.weights.values(), *leaves.shifts.values()):
            leaf.requires_grad_()
        return leaves

    def grads(self) -> dict[str, Tensor]:
        """What the tensors of `of_leaves` have collected: ∇_W̃ (value, key) by layer; zero where nothing was run."""
        leaves = {**self.weights, **self.shifts}
        return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}

    def num_bytes(self) -> int:
        """The memory it takes."""
        return sum(part.nbytes for part in (*self.weights.values(), *self.shifts.values()))


def upright_weight(module: nn.Module) -> Tensor:
    """W as (value, key)."""
    weight = module.get_parameter("weight")
    return weight.T if is_conv1d(module) else weight


def linear_of(lm: LanguageModel, name: str, shift: Tensor) -> nn.Module:
    """The layer that a shift belongs to; EditError where it fits none."""
    try:
        module = lm.model.get_submodule(name)
    except AttributeError:
        module = lm.model
    if not is_linear(module):
        raise EditError(f"the edit changes layer {name!r}, which is no linear layer of {type(lm.model).__name__}")
    key_size, value_size = layer_sizes(module)
    if tuple(shift.shape) != (value_size, key_size):
        raise EditError(
            f"layer {name!r} maps {key_size} to {value_size} numbers, but its shift is {tuple(shift.shape)}; "
            f"expected {(value_size, key_size)}: is this another model's edit?"
        )
    return module


# --- the forward of an edited layer ------------------------------------------------------------------


def _is_edited(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get(innermost_forward(module)), _EditedForward)


class _EditedForward:
    """The forward of a linear layer of which the rows of a batch see different edits."""

    def __init__(self, module: nn.Module, name: str, overlays: Sequence[tuple[Overlay | None, int]]) -> None:
        self.module, self.name, self.overlays = module, name, overlays
        self.bias, self.unedited = module._parameters.get("bias"), getattr(module, innermost_forward(module))
        merged = any(overlay and name in overlay.weights for overlay, _ in overlays)
        assert not (merged and _is_edited(module)), f"{name} is edited already"

    def __call__(self, keys: Tensor) -> Tensor:
        if len(self.overlays) == 1:
            return self._values(self.overlays[0][0], keys)
        rows = [count for _, count in self.overlays]
        by_text = keys.unflatten(0, (sum(rows), -1)) if keys.dim() == 2 else keys  # OPT's FFN sees one long row
        assert by_text.shape[0] == sum(rows), (tuple(keys.shape), rows)
        parts = zip(self.overlays, by_text.split(rows), strict=True)
        values = torch.cat([self._values(overlay, part) for (overlay, _), part in parts])
        return values.reshape(*keys.shape[:-1], values.shape[-1])

    def _values(self, overlay: Overlay | None, keys: Tensor) -> Tensor:
        if overlay and self.name in overlay.weights:
            return F.linear(keys, overlay.weights[self.name], self.bias)
        values: Tensor = self.unedited(keys)
        if overlay and self.name in overlay.shifts:
            values = values + F.linear(keys, overlay.shifts[self.name].to(keys.dtype))
        return values

"""An edit laid over a frozen language model: `with edited(lm, shifts): …`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from malmen.errors import EditError
from malmen.lm.layers import is_linear, layer_sizes
from malmen.lm.model import LanguageModel

Shifts = Mapping[str, Tensor]  # layer name -> S (value, key)


@contextmanager
def edited(lm: LanguageModel, shifts: Shifts) -> Iterator[None]:
    """Inside, each named layer computes (W + S)u + bias. No weight is written, sharded or not.

    Where a shift is a leaf that requires a gradient, its `.grad` is ∇_W̃ of what was run inside.
    """
    with ExitStack() as stack:
        for name, shift in shifts.items():
            module = linear_of(lm, name, shift)
            stack.enter_context(_overlay(module)(module, shift.to(module.get_parameter("weight").device)))
        yield


def _overlay(module: nn.Module) -> Callable[[nn.Module, Tensor], Any]:
    """W + S formed once is faster (one product instead of two), but needs the whole weight, and digits to spare."""
    weight = module.get_parameter("weight")
    whole = not hasattr(weight, "ds_id")  # DeepSpeed marks the parameters it shards
    plain = "forward" not in module.__dict__  # neither inside another edit nor on one of several devices
    return merged if whole and plain and weight.dtype in (torch.float32, torch.float64) else added


@contextmanager
def added(module: nn.Module, shift: Tensor) -> Iterator[None]:
    """Wu + Su by a hook: for sharded weights, and for half precision, where W + S would swallow a small S."""

    shift = shift.to(module.get_parameter("weight").dtype)

    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + F.linear(args[0], shift)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def merged(module: nn.Module, shift: Tensor) -> Iterator[None]:
    """(W + S)u by a forward of our own, with W + S a new tensor."""
    weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
    changed = upright_weight(module) + shift.to(weight.dtype)
    module.__dict__["forward"] = lambda keys: F.linear(keys, changed, bias)
    try:
        yield
    finally:
        del module.__dict__["forward"]


def upright_weight(module: nn.Module) -> Tensor:
    """W as (value, key)."""
    weight = module.get_parameter("weight")
    return weight.T if isinstance(module, Conv1D) else weight


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

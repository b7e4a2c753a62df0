"""An edit laid over a frozen language model: `with edited(lm, shifts): …`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from malmen.errors import EditError
from malmen.layers import is_linear
from malmen.lm import LanguageModel

Shifts = Mapping[str, Tensor]  # layer name -> S (value, key)


@contextmanager
def edited(lm: LanguageModel, shifts: Shifts) -> Iterator[None]:
    """Inside, each named layer computes Wu + Su (+ bias). No weight is read or written, sharded or not.

    Where a shift is a leaf that requires a gradient, its `.grad` is ∇_W̃ of what was run inside.
    """
    handles = []
    try:
        for name, shift in shifts.items():
            handles.append(_linear(lm, name).register_forward_hook(_add(name, shift.to(lm.device))))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _linear(lm: LanguageModel, name: str) -> nn.Module:
    try:
        module = lm.model.get_submodule(name)
    except AttributeError:
        module = lm.model
    if not is_linear(module):
        raise EditError(f"the edit changes layer {name!r}, which is no linear layer of {type(lm.model).__name__}")
    return module


def _add(name: str, shift: Tensor) -> Any:
    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if (output.shape[-1], args[0].shape[-1]) != tuple(shift.shape):
            raise EditError(
                f"layer {name!r} maps {args[0].shape[-1]} to {output.shape[-1]} numbers, but its shift is "
                f"{tuple(shift.shape)}; expected {(output.shape[-1], args[0].shape[-1])}: is this another model's edit?"
            )
        return output + F.linear(args[0], shift.to(args[0].dtype))

    return hook

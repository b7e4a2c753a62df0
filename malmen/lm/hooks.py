"""Changes to how modules run that end with a `with` block, whatever happens inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

Functions = Iterable[tuple[nn.Module, Callable[..., Any]]]


@contextmanager
def hooked(hooks: Functions, *, before: bool = False) -> Iterator[None]:
    """Inside, each hook runs after its module's forward, or `before` it; its arguments are torch's."""
    with ExitStack() as undo:
        for module, hook in hooks:
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            undo.callback(register(hook).remove)
        yield


@contextmanager
def replaced_forward(
    forwards: Functions, *, attribute: Callable[[nn.Module], str] = lambda _: "forward"
) -> Iterator[None]:
    """Inside, each module runs the given function as its forward, within the hooks that it has.

    Afterwards the forward that was in force before is in force again: the class's, or an outer replacement.
    """
    with ExitStack() as undo:
        for module, forward in forwards:
            name, own = attribute(module), module.__dict__
            if name in own:
                undo.callback(own.__setitem__, name, own[name])
            else:
                undo.callback(own.pop, name)
            own[name] = forward
        yield


def innermost_forward(module: nn.Module) -> str:
    """The attribute that holds a module's own forward. accelerate, which spreads a model over several devices, puts a
    wrapper in the place of `forward` and calls `_old_forward` from it."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"

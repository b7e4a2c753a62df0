"""What must be the same before and after whatever was done to a frozen model."""

from __future__ import annotations

import hashlib

from malmen.lm.model import LanguageModel


def digest(lm: LanguageModel) -> str:
    """A hash of every bit of its weights."""
    found = hashlib.sha256()
    for name, tensor in lm.model.state_dict().items():
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def count_hooks(lm: LanguageModel) -> int:
    """Hooks and replaced forwards on all its modules."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + ("forward" in module.__dict__)
        for module in lm.model.modules()
    )

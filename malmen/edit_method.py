"""What all ways of editing have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from malmen.data.records import Fact
from malmen.errors import EditError
from malmen.lm.model import LanguageModel


class Edit(Protocol):
    """What an edit comes to."""

    @property
    def shifts(self) -> dict[str, Tensor]:
        """S of each edited layer (value, key)."""

    def mean_residual(self) -> float | None:
        """How far the shifts miss what was wanted, where something was."""


class EditMethod(Protocol):
    """A way of editing: MALMEN's trained editor, or one of its rivals."""

    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> Edit:
        """The shifts that are to make all these facts hold."""


@dataclass(frozen=True)
class PlainEdit:
    """Shifts, and their mean residual where the method has one."""

    shifts: dict[str, Tensor]
    residual: float | None = None

    def mean_residual(self) -> float | None:
        """MR."""
        return self.residual


def finite(shifts: dict[str, Tensor]) -> dict[str, Tensor]:
    """These shifts; EditError where they are not finite, because nothing would tell afterwards."""
    broken = [name for name, shift in shifts.items() if not bool(torch.isfinite(shift).all())]
    if broken:
        raise EditError(f"the shift of {', '.join(broken[:4])} is not finite: the edit has diverged")
    return shifts


def require_facts(facts: Sequence[Fact]) -> None:
    """There must be some."""
    if not facts:
        raise EditError("no facts to edit were given")

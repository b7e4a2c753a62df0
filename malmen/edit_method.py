"""The interface of every way of editing: facts in, shifts out, or another text in place of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from malmen.data.records import Fact
from malmen.editor import Editor, Solved
from malmen.lm.model import LanguageModel

# What the model reads in place of a prompt, before any chat template. It ends as the prompt does, so that the answer
# has the same tokens.
Rewrite = Callable[[str], str]


@dataclass(frozen=True)
class PlainEdit:
    """The result of a rival, with what an editor's `Solved` says, too."""

    shifts: dict[str, Tensor]  # S of each edited layer (value, key)
    residual: float | None = None
    rewrite: Rewrite | None = None  # of a method that changes what is read, too

    def mean_residual(self) -> float | None:
        """MR: how far the shifts miss the value differences they were to reach; None if the method has no such aim."""
        return self.residual


class UntrainedMethod(ABC):
    """A rival that needs no meta-training: made from a model and a config (malmen.methods.registry)."""

    @abstractmethod
    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> PlainEdit:
        """The shifts that make all these facts hold at once; the LM itself stays as it is."""

    def prepare(self, lm: LanguageModel) -> float:
        """Do the work that all edits of a model share; the seconds that it took, now or when it was first done."""
        return 0.0

    def for_rounds(self) -> UntrainedMethod:
        """The method for a series of edits, each of the model as the one before left it."""
        return self


def rewrite_of(edit: PlainEdit | Solved) -> Rewrite | None:
    """How an edit changes what the model reads; None for one of weights alone."""
    return edit.rewrite if isinstance(edit, PlainEdit) else None


EditMethod = Editor | UntrainedMethod  # MALMEN's trained editor (or MEND's), or a rival

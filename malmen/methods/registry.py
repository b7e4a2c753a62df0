"""All editing methods, one entry each: what commands, experiments, tables and pictures know about a method.

Importing this module loads no torch. A method's own module is imported when the method is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from malmen.config import Config
    from malmen.edit_method import UntrainedMethod
    from malmen.lm.model import LanguageModel

# How later rounds of editing join earlier ones: `union` solves for the facts of all rounds, `again` edits the edited
# model.
Rounds = Literal["union", "again"]


@dataclass(frozen=True)
class Method:
    """An editing method. One with `make` needs no meta-training; any other is an editor that a run trains."""

    name: str  # of the option --method, of its settings `baselines.NAME`, and in files of results
    label: str  # in tables and pictures
    colour: str  # of its lines in pictures, a matplotlib colour
    marker: str  # of its points in pictures, a matplotlib marker
    rounds: tuple[Rounds, ...] = ()  # what the experiment `rounds` compares; () leaves the method out
    make: Callable[[LanguageModel, Config], UntrainedMethod] | None = None
    training_config: Callable[[Config], Config] = lambda config: config  # from MALMEN's config to the method's own

    @property
    def trained(self) -> bool:
        """Whether it needs a meta-trained editor."""
        return self.make is None

    def settings(self, config: Config) -> dict[str, Any]:
        """Its own settings, as plain values; MALMEN's are those of the run."""
        section = getattr(config.baselines, self.name, None)
        return {} if section is None else dict(section.model_dump(mode="json"))


def _mend(config: Config) -> Config:
    from malmen.methods.mend import mend_config

    return mend_config(config)


def _fine_tune(lm: LanguageModel, config: Config) -> UntrainedMethod:
    from malmen.methods.fine_tune import FineTune

    return FineTune(lm, config)


def _memit(lm: LanguageModel, config: Config) -> UntrainedMethod:
    from malmen.methods.memit import Memit

    return Memit(lm, config)


def _ultraedit(lm: LanguageModel, config: Config) -> UntrainedMethod:
    from malmen.methods.ultraedit import UltraEdit

    return UltraEdit(lm, config)


METHODS = {
    method.name: method
    for method in (
        Method("malmen", "MALMEN", "C0", "o", rounds=("union", "again")),
        Method("mend", "MEND", "C1", "s", training_config=_mend),
        Method("ft", "FT", "C2", "^", rounds=("again",), make=_fine_tune),
        Method("memit", "MEMIT", "C3", "D", make=_memit),
        Method("ultraedit", "UltraEdit", "C4", "v", rounds=("again",), make=_ultraedit),
    )
}

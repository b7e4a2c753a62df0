"""The rivals by name."""

from __future__ import annotations

from collections.abc import Callable

from malmen.config import Config
from malmen.edit_method import EditMethod
from malmen.lm.model import LanguageModel
from malmen.methods.fine_tune import FineTune
from malmen.methods.memit import Memit
from malmen.methods.ultraedit import UltraEdit

TRAINED = ("malmen", "mend")
UNTRAINED: dict[str, Callable[[LanguageModel, Config], EditMethod]] = {
    "ft": FineTune,
    "memit": Memit,
    "ultraedit": UltraEdit,
}
METHODS = (*TRAINED, *UNTRAINED)

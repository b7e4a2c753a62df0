"""The rivals by name."""

from __future__ import annotations

from collections.abc import Callable

from malmen.baselines.fine_tune import FineTune
from malmen.baselines.memit import Memit
from malmen.baselines.method import EditMethod
from malmen.baselines.ultraedit import UltraEdit
from malmen.config import Config
from malmen.lm import LanguageModel

TRAINED = ("malmen", "mend")
UNTRAINED: dict[str, Callable[[LanguageModel, Config], EditMethod]] = {
    "ft": FineTune,
    "memit": Memit,
    "ultraedit": UltraEdit,
}
METHODS = (*TRAINED, *UNTRAINED)

"""MALMEN: massive editing of language models by meta learning, in plain torch (Tan, Zhang & Fu, ICLR 2024)."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from malmen.config import Config as Config
    from malmen.data.readers import read_records as read_records
    from malmen.data.records import EditRecord as EditRecord
    from malmen.data.records import Fact as Fact
    from malmen.editor import Editor as Editor
    from malmen.errors import EditError as EditError
    from malmen.evaluate import evaluate as evaluate
    from malmen.lm.generate import ask as ask
    from malmen.lm.model import load_lm as load_lm
    from malmen.lm.overlay import edited as edited
    from malmen.training import train as train

__version__ = "0.1.0"

# The rooms malmen.platform, malmen.tune and malmen.serve live beside this folder, not in it. A wheel puts them
# inside; in a source checkout (editable, or shipped whole to Ray workers that have nothing installed) they are
# found because the root of the checkout is a second place to look for submodules of malmen.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "platform").is_dir():
    __path__.append(str(_root))

_HOMES = {
    "Config": "config",
    "EditError": "errors",
    "EditRecord": "data.records",
    "Editor": "editor",
    "Fact": "data.records",
    "ask": "lm.generate",
    "edited": "lm.overlay",
    "evaluate": "evaluate",
    "load_lm": "lm.model",
    "read_records": "data.readers",
    "train": "training",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used: `malmen --help` should not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'malmen' has no attribute {name!r}")
    return getattr(import_module(f"malmen.{_HOMES[name]}"), name)

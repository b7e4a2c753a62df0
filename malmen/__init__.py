"""MALMEN: massive editing of language models by meta learning, in plain torch (Tan, Zhang & Fu, ICLR 2024)."""

from pathlib import Path

__version__ = "0.1.0"

# The rooms malmen.platform, malmen.tune and malmen.serve live beside this folder, not in it. A wheel puts them
# inside; in a source checkout (editable, or shipped whole to Ray workers that have nothing installed) they are
# found because the root of the checkout is a second place to look for submodules of malmen.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "platform").is_dir():
    __path__.append(str(_root))

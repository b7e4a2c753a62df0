"""The frozen language model: loading it, finding its layers, tracing it, laying edits over it, asking it.

Nothing here knows the hyper-network or the normal equation. May import `malmen.data`, `malmen.runs`, `malmen.config`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Exports of classifiers name `malmen.lm.FirstTokenClassifier`; loaded on use, since it needs transformers."""
    if name != "FirstTokenClassifier":
        raise AttributeError(f"module 'malmen.lm' has no attribute {name!r}")
    from malmen.lm.model import FirstTokenClassifier

    return FirstTokenClassifier

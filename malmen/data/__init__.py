"""What is edited: facts and edit records, their formats, their tokens, and the built-in world.

`splits` reads the training and held-out records of a run, `sampling` draws the batch of each step. Nothing here runs a
language model, except `world_model` and `claims_model`, which train one for the built-in world and for claims.
"""

from importlib import import_module
from typing import Any

_HOMES = {"EditRecord": "records", "Fact": "records", "read_records": "readers", "write_records": "readers"}


def __getattr__(name: str) -> Any:
    """Public names are loaded on first use: a process that needs only tokens does not load the readers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'malmen.data' has no attribute {name!r}")
    return getattr(import_module(f"malmen.data.{_HOMES[name]}"), name)

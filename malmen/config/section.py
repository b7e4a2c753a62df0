"""What all groups of settings have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings that knows no other keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

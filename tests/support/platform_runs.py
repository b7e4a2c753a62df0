"""Small runs of the platform in float64, beside the same runs in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model_folders import write_model, write_records

from malmen.config import Config


def make_platform_config(kind: str, folder: Path, **changes: dict[str, Any]) -> Config:
    """Three steps of five edits in two blocks, with a model and records of this kind in `folder`."""
    model, records = folder / kind, folder / f"{kind}.jsonl"
    if not records.exists():
        write_model(kind, model)
        write_records(kind, records)
    settings: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "dtype": "float64", "device": "cpu"},
        "editor": {"layers": "last:2", "rank": 5, "edit_lr": 0.01},
        "training": {"num_edits": 5, "steps": 3, "meta_lr": 1e-2, "checkpoint_every": 2, "locality_coef": 0.7},
        "data": {"train": str(records), "validation": str(records), "format": "malmen"},
        "batch": {"token_budget": 40, "hypernet_rows": 7},
        "cluster": {"lm_cpus": 0.5, "hypernet_cpus": 0.25, "wait_seconds": 60, "stall_seconds": 150},
        "tracking": {"enabled": False},
    }
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values}
    return Config.model_validate(settings)

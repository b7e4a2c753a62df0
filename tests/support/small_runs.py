"""Runs on the built-in world that take a second."""

from __future__ import annotations

from malmen.config import Config


def make_config(**training: object) -> Config:
    """Six steps of five edits in two layers; `training` changes that."""
    return Config.model_validate(
        {
            "editor": {"layers": "last:2", "rank": 8, "edit_lr": 1e-3, "parametrisation": "relative"},
            "training": {
                "num_edits": 5,
                "steps": 6,
                "meta_lr": 1e-3,
                "schedule": "cosine",
                "checkpoint_every": 2,
                **training,
            },
        }
    )


# the same on the command line
SMALL = [
    *["rank=8", "layers=last:2", "training.steps=3", "num_edits=4", "eval_edits=4", "eval_every=0"],
    *["own_text.texts=32", "preserved_facts=64"],
]

# the built-in world's config with the paper's equation, and all of a step's given facts
PLAIN = [
    "editor.token_weights=equal",
    "editor.learn_preserved_weight=false",
    "editor.preserved_weight=0",
    "data.unrelated=given",
    "training.min_edits=null",
    "training.equivalents_per_step=null",
    "training.unrelated_per_step=null",
]

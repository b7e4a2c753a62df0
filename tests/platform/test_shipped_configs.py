"""The shipped configs learn with the paper's learning rates: on models of their architectures, made small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SMALL, small_lm
from tiny_models import random_facts

import malmen.platform.cli.options as options
from malmen.config import Config, load_config
from malmen.data.tokens import EncodedFact, MetaBatch, make_batches
from malmen.editor import Editor, seeded_editor
from malmen.lm.layers import find_layers
from malmen.lm.losses import nll
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import edited
from malmen.lm.trace import trace
from malmen.meta import meta_step

EDITS = 16  # at once; the configs' own hundreds and thousands are for larger models
PAPERS = {  # of the configs that name a paper's set-up
    "editor": {"rank": 1920, "blocks": 2, "edit_lr": 1e-6, "damping": 1.0},
    "training": {
        "meta_lr": 1e-5,
        "scalar_lr": None,
        "schedule": "constant",
        "locality_coef": 1.0,
        "max_grad_norm": 1.0,
    },
}


def shipped(name: str) -> Config:
    return load_config(Path(options.CONFIGS) / f"{name}.yaml")


def edit_loss(lm: LanguageModel, facts: list[EncodedFact], shifts: dict[str, Any]) -> float:
    """−log p(answer) of a fact, edited by these shifts; the mean."""
    with torch.no_grad(), edited(lm, shifts):
        batches = make_batches(facts, 4096, lm.pad_id)
        return sum(float(nll(lm.log_probs(batch), batch.targets)) for batch in batches) / len(facts)


def held_out_loss(lm: LanguageModel, editor: Editor, facts: list[EncodedFact]) -> float:
    traces = trace(lm, editor.layers, make_batches(facts, 4096, lm.pad_id), editor.config.editor.tokens)
    return edit_loss(lm, facts, editor.solve(traces).shifts)


@pytest.mark.parametrize("name", SMALL)
def test_the_shipped_configs_have_the_papers_hyper_parameters(name: str) -> None:
    config = shipped(name).model_dump()
    assert {part: {key: config[part][key] for key in values} for part, values in PAPERS.items()} == PAPERS


def lowest_loss(name: str, **editor: Any) -> tuple[float, float]:
    """The loss of held-out edits before training and, edited, the lowest while training; ends when that is a half."""
    config, lm = shipped(name), small_lm(name)
    config = config.model_copy(update={"editor": config.editor.model_copy(update=editor)})
    trained = seeded_editor(find_layers(lm.model, config.editor.layers, config.editor.ffn), config)
    held_out = random_facts(lm, EDITS, seed=10_000)
    unedited = lowest = edit_loss(lm, held_out, {})
    for step in range(config.training.steps):
        edits = random_facts(lm, EDITS, seed=2 * step)
        meta_step(lm, trained, MetaBatch(edits, edits, random_facts(lm, EDITS, seed=2 * step + 1)))
        if step % 10 == 9 or step == config.training.steps - 1:
            lowest = min(lowest, held_out_loss(lm, trained, held_out))
        if lowest <= unedited / 2:
            break
    return unedited, lowest


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_with_the_papers_hyper_parameters_the_loss_of_held_out_edits_falls_by_half(name: str) -> None:
    unedited, edited_loss = lowest_loss(name)
    assert edited_loss <= unedited / 2


@pytest.mark.slow
def test_the_same_learning_rates_teach_nothing_where_steps_are_relative() -> None:
    unedited, edited_loss = lowest_loss("gpt-j", parametrisation="relative")
    assert edited_loss > 0.98 * unedited
